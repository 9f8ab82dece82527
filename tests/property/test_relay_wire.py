"""Strangers' bytes: whatever comes, a decoder gives a message or a `ProtocolViolation`, and holds a bounded amount."""

from __future__ import annotations

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from isthmus_kvrelay import control, wire
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import Grant, LaneId, SlotUse
from isthmus_kvrelay.framing import FrameReader, cut, pack, prefixed, unpack
from isthmus_kvrelay.lane_codec import messages_of
from isthmus_kvrelay.transports import handshake
from isthmus_shared.errors import Cancelled, ProtocolViolation
from isthmus_testing.relay_world import flow

ME, PEER = wire.incarnation_digest("me"), wire.incarnation_digest("peer")  # type: ignore[arg-type]
KEY = flow("transfer", 2)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
kinds = st.sampled_from(
    [
        "hello",
        "open_sink",
        "seal",
        "sink_quiet",
        "release",
        "abort",
        "bye",
        "welcome",
        "refused",
        "sink_opened",
        "sink_ended",
        "source_failed",
        "sink_attached",
        "source_attached",
        "pull",
        "declined",
        "opened",
        "credit",
        "done",
        "revoke",
        "quiet",
        "feedback",
        "step",
        "itl",
        "ping",
        "pong",
        "dialer_hello",
        "acceptor_hello",
        "dialer_proof",
        "joined",
    ]
)
fields = st.sampled_from(
    [
        "transfer_id",
        "generation",
        "bell",
        "token",
        "consumed",
        "total_bytes",
        "chunk_bytes",
        "manifest",
        "packed",
        "fault",
        "slots",
        "chunks",
        "deadline_s",
        "wait_s",
        "source",
        "worker",
        "version",
        "relay",
        "nonce",
        "proof",
        "lane",
        "stream",
        "streams",
        "wanted",
        "incarnation",
        "pull",
        "kv_tokens",
        "step_s",
        "itl_s",
        "target_s",
        "kv_blocks_free",
        "kv_block_tokens",
    ]
)
near_misses = st.builds(
    lambda kind, rest: {"kind": kind, "transfer_id": "t", "generation": 1, **rest},
    kinds,
    st.dictionaries(fields, trees, max_size=5),
)
payloads = st.binary(max_size=300) | trees.map(msgpack.packb) | near_misses.map(msgpack.packb)


@given(payloads)
def test_control_payloads_decode_or_violate(payload: bytes) -> None:
    for decode in (control.decode_from_client, control.decode_from_relay):
        try:
            message = decode(payload)
        except ProtocolViolation:
            continue
        assert decode(control.encode(message)[4:]) == message


@given(payloads)
def test_handshake_payloads_decode_or_violate(payload: bytes) -> None:
    for kind in (handshake.DialerHello, handshake.AcceptorHello, handshake.DialerProof, handshake.Rejected):
        try:
            unpack(payload, TypeAdapter(kind), what="handshake")
        except ProtocolViolation:
            continue


@given(payloads, st.integers(1, 50))
def test_a_lane_control_stream_decodes_or_violates(payload: bytes, step: int) -> None:
    header = wire.Header(wire.FrameType.CONTROL, len(payload), PEER, ME, xxhash.xxh3_64_intdigest(payload))
    data = header.encode() + payload
    reader = wire.ControlReader(sender=PEER, receiver=ME)
    try:
        for start in range(0, len(data), step):
            for message in reader.feed(data[start : start + step]):
                if isinstance(message, wire.Credit):
                    message.grants()
    except ProtocolViolation:
        pass


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_random_headers_violate(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        wire.Header.decode(data, limit=1 << 20)


@given(st.integers(0, wire.HEADER_BYTES - 1), st.integers(1, 255))
def test_a_flipped_header_byte_changes_what_it_says_or_violates(where: int, flip: int) -> None:
    good = wire.Header(wire.FrameType.CHUNK, 100, PEER, ME, 1, 2, SlotUse(3, 4), 5, bytes(16), 6)
    data = bytearray(good.encode())
    data[where] ^= flip
    try:
        assert wire.Header.decode(data, limit=1 << 20) != good
    except ProtocolViolation:
        pass


@given(st.lists(st.binary(max_size=200), max_size=10), st.integers(1, 64))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[bytes], step: int) -> None:
    data = b"".join(prefixed(frame) for frame in frames)
    reader = FrameReader(limit=200)
    out = [frame for start in range(0, len(data), step) for frame in reader.feed(data[start : start + step])]
    assert out == frames


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolViolation):
        list(FrameReader(limit=200).feed((201).to_bytes(4, "big")))
    header = wire.Header(wire.FrameType.CONTROL, wire.MAX_CONTROL_BYTES + 1, PEER, ME)
    with pytest.raises(ProtocolViolation):
        list(wire.ControlReader(sender=PEER, receiver=ME).feed(header.encode()))


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), max_size=20)
)
def test_grants_survive_the_wire(raw: list[tuple[int, int, int]]) -> None:
    grants = tuple(Grant(chunk, SlotUse(slot, use)) for chunk, slot, use in raw)
    found: list[Grant] = []
    reader = wire.ControlReader(sender=ME, receiver=PEER)
    for batch in wire.Credit.batches(KEY, 3, grants):
        for message in reader.feed(wire.encode_control(batch, sender=ME, receiver=PEER)):
            assert isinstance(message, wire.Credit)
            assert (message.key, message.pull) == (KEY, 3)
            found += message.grants()
    assert tuple(found) == grants


def test_a_frame_of_another_life_is_refused() -> None:
    frame = wire.encode_control(wire.Ping(), sender=PEER, receiver=ME)
    other = wire.incarnation_digest("an older life")  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation):
        list(wire.ControlReader(sender=other, receiver=ME).feed(frame))
    with pytest.raises(ProtocolViolation):
        list(wire.ControlReader(sender=PEER, receiver=other).feed(frame))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_checksum_notices_any_flipped_bit_and_any_other_identity(payload: bytes, data: st.DataObject) -> None:
    digest = wire.flow_digest(KEY)
    right = wire.checksum(payload, flow=digest, chunk=3)
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert wire.checksum(damaged, flow=digest, chunk=3) != right
    assert wire.checksum(payload, flow=digest, chunk=4) != right
    assert wire.checksum(payload, flow=wire.flow_digest(flow("transfer", 3)), chunk=3) != right


def test_the_longest_fault_fits_every_frame_that_carries_one() -> None:
    long = "\U0001f600" * 100_000
    fault = Cancelled(long, why=long, todo=long, param=long).to_fault()
    for effect in (ev.SendAbort(LaneId(1), KEY, 1, fault), ev.SendRevoke(LaneId(1), KEY, 1, fault)):
        (message,) = messages_of(effect)
        assert len(wire.encode_control(message, sender=ME, receiver=PEER)) < wire.MAX_CONTROL_BYTES
    rejected = handshake.Rejected(fault=cut(fault))
    assert len(pack(rejected)) < handshake.MAX_HELLO_BYTES
