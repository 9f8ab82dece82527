"""Fixtures for every test (loaded by `tests/conftest.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.server import EmbeddedNats


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engines", choices=("own", "vllm"), default="own", help="whose contract is tested")


@pytest.fixture
async def nats_server() -> AsyncIterator[EmbeddedNats]:
    """A fresh nats-server on a free loopback port."""
    async with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def memory_broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def leak_check() -> AsyncIterator[None]:
    """Fails the test if it leaves a task running that it did not find."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()]
    assert not left, f"tasks left running: {left}"


@pytest.fixture(autouse=True)
def own_log_settings() -> Iterator[None]:
    """A test that runs a command or a service in process configures structlog for everybody: undone after it."""
    yield
    structlog.reset_defaults()
