"""The quick reader of StepEvents: whatever it takes, the full one reads as the same; all else it leaves alone."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.messages.quick import QuickSteps, read_steps
from isthmus_shared.messages.work import FinishReason, SequenceEvent, StepEvents, StepFacts, WorkerRef

COUNTS = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e9)
TEXTS = st.text(max_size=12)
WORKERS = st.builds(WorkerRef, worker_id=TEXTS, incarnation=TEXTS, node_id=TEXTS)
EVENTS = st.builds(
    SequenceEvent,
    request_id=TEXTS,
    generation=st.integers(-1, 2**40),
    output_index=COUNTS,
    token_ids=st.lists(COUNTS, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    cached_tokens=st.integers(-1, 2**31),
)
FACTS = st.builds(
    StepFacts,
    number=COUNTS,
    ended_s=SECONDS,
    step_s=SECONDS,
    decode_sequences=COUNTS,
    prefill_tokens=COUNTS,
    kv_loads=COUNTS,
)
STEPS = st.builds(
    StepEvents, worker=WORKERS, events=st.lists(EVENTS, min_size=1, max_size=4).map(tuple), step=st.none() | FACTS
)
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2, 3, 1.0, 1.5, float("nan"), float("inf"), 2**64 - 1, "1", "stop", b"x", [], {}]
)


def full(data: bytes) -> dict[str, Any] | None:
    try:
        return StepEvents.decode(data).model_dump()
    except ProtocolViolation:
        return None


def as_full(quick: QuickSteps) -> dict[str, Any]:
    step = quick.step
    return StepEvents(
        worker=WorkerRef(
            worker_id=quick.worker.worker_id, incarnation=quick.worker.incarnation, node_id=quick.worker.node_id
        ),
        events=tuple(event.as_event() for event in quick.events),
        step=None if step is None else StepFacts(**{name: getattr(step, name) for name in step.__struct_fields__}),
    ).model_dump()


def check(data: bytes) -> bool:
    """Whether it was taken."""
    quick = read_steps(data)
    if quick is not None:
        assert as_full(quick) == full(data)
    return quick is not None


@given(STEPS)
def test_the_usual_message_is_read_quickly_and_as_the_full_reader_reads_it(steps: StepEvents) -> None:
    assert check(steps.encode())


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [at, *(path for key in keys for path in paths(value[key], (*at, key)))]


@given(STEPS, st.data(), ODD)
def test_with_any_one_value_replaced_removed_or_added_both_readers_agree(
    steps: StepEvents, data: st.DataObject, odd: Any
) -> None:
    fields = msgpack.unpackb(steps.encode())
    *where, last = data.draw(st.sampled_from([path for path in paths(fields) if path]))
    place = fields
    for key in where:
        place = place[key]
    how = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if how == "replace":
        place[last] = odd
    elif how == "remove":
        del place[last]
    elif isinstance(place, dict):
        place[data.draw(st.sampled_from(["logprobs", "fault", "min", "more"]))] = odd
    check(msgpack.packb(fields))


@given(STEPS, st.data())
def test_with_bytes_changed_or_cut_both_readers_agree(steps: StepEvents, data: st.DataObject) -> None:
    wire = bytearray(steps.encode())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    check(bytes(wire[: data.draw(st.integers(0, len(wire)))] if data.draw(st.booleans()) else wire))


@given(st.binary(max_size=64))
@example(b"\x81" * 5000)
@example(b"\x82\xa4kind\xabstep_events\xa1v\x02")
def test_noise_is_left_to_the_full_reader(data: bytes) -> None:
    check(data)
