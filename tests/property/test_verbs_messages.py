"""A peer's words on a verbs lane: any bytes either make sense or are a `ProtocolViolation`."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from isthmus_kvrelay.transports.verbs.messages import ADAPTER, MAX_RAILS, RailDown, RailOffer
from isthmus_kvrelay.wire import FrameType, Header, MessageReader, encode_control
from isthmus_shared.errors import ProtocolViolation

ME, PEER = b"me------", b"peer----"
OFFER: dict[str, Any] = {
    "rail": 0,
    "attempt": 1,
    "number": 17,
    "psn": 7,
    "gid": bytes(10) + b"\xff\xff\x0a\x4d\x00\x01",
    "lid": 0,
    "mtu": 5,
    "pool_address": 2**47,
    "pool_rkey": 0x1234,
    "heads_address": 2**46,
    "heads_rkey": 0x5678,
    "slots": 64,
    "slot_bytes": 4096,
    "receives": 64,
    "device": "rxe0",
}


def read(data: bytes) -> list[Any]:
    return list(MessageReader(ADAPTER, sender=PEER, receiver=ME).feed(data))


def test_what_is_said_is_what_is_heard() -> None:
    offer = RailOffer(**OFFER)
    down = RailDown(rail=1, attempt=2, landed=3, why="retries exceeded")
    data = b"".join(encode_control(message, sender=PEER, receiver=ME) for message in (offer, down))
    assert read(data) == [offer, down]


@pytest.mark.parametrize(
    "change",
    [
        {"rail": MAX_RAILS},
        {"number": 2**24},
        {"gid": bytes(15)},
        {"mtu": 0},
        {"mtu": 6},
        {"slots": 0},
        {"receives": 0},
        {"pool_address": 2**64 - 64 * 4096 + 1},
        {"heads_address": 2**64 - 1},
        {"pool_rkey": -1},
        {"device": ""},
        {"more": 1},
    ],
)
def test_an_offer_that_cannot_be_is_a_violation(change: dict[str, Any]) -> None:
    payload = msgpack.packb({"kind": "rail_offer"} | OFFER | change)
    with pytest.raises(ProtocolViolation):
        read(framed(payload))


def framed(payload: bytes) -> bytes:
    check = xxhash.xxh3_64_intdigest(payload)
    return Header(FrameType.CONTROL, len(payload), PEER, ME, check).encode() + payload


VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=20)
KINDS = ["rail_offer", "rail_answer", "rail_refused", "rail_up", "rail_down", "receives", "ping"]


@given(
    kind=st.sampled_from(KINDS) | st.text(max_size=10),
    changes=st.dictionaries(st.sampled_from(sorted(OFFER)) | st.text(max_size=5), VALUES, max_size=6),
)
def test_no_frame_does_anything_but_make_sense_or_violate(kind: str, changes: dict[str, Any]) -> None:
    payload = msgpack.packb({"kind": kind} | OFFER | changes)
    try:
        (message,) = read(framed(payload))
    except ProtocolViolation:
        return
    assert message.kind == kind
