"""Tests on real vLLM. Without it they are skipped, loudly."""

from __future__ import annotations

import pytest

from isthmus_testing.vllm_engines import vllm_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = vllm_missing()
    if missing is not None:
        for item in items:
            if "tests/vllm/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=missing))
