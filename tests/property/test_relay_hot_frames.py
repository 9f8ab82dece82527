"""Frames that are packed by hand: they come out as they went in, and whatever else comes is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_kvrelay import control, hot, wire
from isthmus_kvrelay.core.events import FlowKey, Grant, Offer, SlotUse
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Generation, Incarnation, TransferId

names = st.text(min_size=1, max_size=200).filter(lambda text: text.isprintable())
numbers = st.integers(1, 2**32 - 1)
counts = st.integers(0, 2**63 - 1)
keys = st.builds(FlowKey, names.map(TransferId), numbers.map(Generation))
indices = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(lambda each: control.pack_indices(tuple(each)))
grants = st.lists(
    st.builds(Grant, st.integers(0, 2**32 - 1), st.builds(SlotUse, st.integers(0, 2**32 - 1), counts)), max_size=20
).map(tuple)

from_client = st.builds(lambda key, chunks: hot.FilledNotice(*key, chunks), keys, indices) | st.builds(
    lambda key, *rest: hot.OpenSourceRequest(*key, *rest),
    keys,
    names.map(Incarnation),
    names,
    counts,
    names,
    st.floats(0, 86_400, exclude_min=True),
    numbers,
    counts,
)
from_relay = st.builds(lambda key, *rest: hot.SourceReadyNotice(*key, *rest), keys, numbers, indices, counts)
from_peer = st.builds(hot.EagerPull, keys, numbers, st.builds(Offer, counts, counts, names, grants))


@given(from_client)
def test_a_clients_frame_comes_out_as_it_went_in(frame: control.ClientMessage) -> None:
    assert control.decode_from_client(control.encode(frame)[4:]) == frame


@given(from_relay)
def test_a_relays_frame_comes_out_as_it_went_in(frame: control.RelayMessage) -> None:
    assert control.decode_from_relay(control.encode(frame)[4:]) == frame


@given(from_peer)
def test_a_peers_frame_comes_out_as_it_went_in(frame: wire.EagerPull) -> None:
    me, peer = bytes(8), bytes(range(8))
    reader = wire.ControlReader(sender=peer, receiver=me)
    assert list(reader.feed(wire.encode_control(frame, sender=peer, receiver=me))) == [frame]


@given(from_client | from_relay | from_peer, st.data())
def test_a_frame_that_is_cut_short_or_bent_is_another_one_or_a_violation(frame: hot.Hot, data: st.DataObject) -> None:
    packed = bytearray(frame.packed())
    if data.draw(st.booleans()):
        del packed[data.draw(st.integers(1, len(packed) - 1)) :]
    else:
        packed[data.draw(st.integers(1, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    readers = {
        hot.FILLED: hot.read_filled,
        hot.OPEN_SOURCE: hot.read_open_source,
        hot.SOURCE_READY: hot.read_source_ready,
        hot.EAGER_PULL: hot.read_eager_pull,
    }
    try:
        found = readers[bytes(packed[:1])](bytes(packed))
    except ProtocolViolation:
        return
    assert found != frame
    assert found.problem() is None


GOOD = hot.OpenSourceRequest(TransferId("t"), Generation(1), Incarnation("p"), "a:1", 10, "m", 1.0, 1, 0)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("transfer_id", ""),
        ("transfer_id", "x" * 201),
        ("generation", 0),
        ("peer", ""),
        ("address", "x" * 1_001),
        ("manifest", ""),
        ("deadline_s", 0.0),
        ("deadline_s", 86_401.0),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
        ("pull", 0),
        ("total_bytes", 2**63),
    ],
)
def test_a_field_beyond_its_bounds_is_named(field: str, bad: object) -> None:
    with pytest.raises(ProtocolViolation, match=field):
        hot.read_open_source(GOOD._replace(**{field: bad}).packed())  # type: ignore[arg-type]


def test_something_left_over_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="left over"):
        hot.read_open_source(GOOD.packed() + b"\0")
