"""The user's own bus is looked at before anything is started on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_cli.nats_server import bus, checked
from isthmus_shared.errors import BusDisconnected, ConfigInvalid


@pytest.mark.parametrize(
    "url", ["", "localhost:4222", "http://localhost:4222", "nats://", "nats://host:42x", "nats://a:0"]
)
def test_what_can_be_no_server_is_refused_by_the_variables_name(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="NATS_URL") as caught:
        checked(url)
    assert caught.value.param == "NATS_URL"


@pytest.mark.parametrize("url", ["nats://localhost", "nats://u:p@10.0.0.1:4222", "tls://[::1]:4222"])
def test_what_can_be_one_is_taken_as_it_is(url: str) -> None:
    assert checked(url) == url


async def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_cli.nats_server.FOUND_S", 0.3)
    with pytest.raises(BusDisconnected, match="no bus at nats:"):
        async with bus("nats://127.0.0.1:1", tmp_path / "nats.log", lambda what, pid: None, {}):
            pass
