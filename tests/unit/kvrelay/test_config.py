from __future__ import annotations

import math

import pytest

from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.ids import Incarnation

NEEDED = {
    "ISTHMUS_RELAY_NODE_ID": "a",
    "ISTHMUS_RELAY_SOCKET": "/run/isthmus/a.sock",
    "ISTHMUS_RELAY_SECRET": "0123456789abcdef",
}


def test_the_defaults_make_a_relay() -> None:
    settings = RelayConfig.load(NEEDED).settings(Incarnation("life"))
    assert settings.relay.total_slots == 128
    assert settings.relay.out_limit == 64
    assert settings.relay.rate_bytes_per_s == math.inf
    assert settings.transport.tcp.advertise == "127.0.0.1"
    assert settings.transport.tcp.port == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SECRET", "short"),
        ("NODE_ID", "two words"),
        ("OUT_SHARE", "1"),
        ("SLOT_BYTES", "100"),
        ("STREAMS", "0"),
        ("RATE_BYTES_PER_S", "-1"),
        ("POOL_BYTES", "300000"),
        ("POOL", "1"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"ISTHMUS_RELAY_{name}"):
        RelayConfig.load({**NEEDED, f"ISTHMUS_RELAY_{name}": value})


@pytest.mark.parametrize("missing", sorted(NEEDED))
def test_a_missing_setting_is_named(missing: str) -> None:
    with pytest.raises(ConfigInvalid, match=missing):
        RelayConfig.load({name: value for name, value in NEEDED.items() if name != missing})


def test_the_secret_is_never_shown() -> None:
    config = RelayConfig.load(NEEDED)
    assert NEEDED["ISTHMUS_RELAY_SECRET"] not in repr(config)
