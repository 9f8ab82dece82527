from __future__ import annotations

from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.work import SequenceEvent, StepEvents, TokenLogprob, WorkerRef
from isthmus_worker.outbox import by_subject, encoded

WORKER = WorkerRef(worker_id=WorkerId("w"), incarnation=Incarnation("i"), node_id=NodeId("n"))


def event(request: str, tops: int = 0) -> SequenceEvent:
    logprob = TokenLogprob(logprob=-1.0, top=tuple((token, -1.0) for token in range(tops)))
    return SequenceEvent(
        request_id=RequestId(request), generation=Generation(1), output_index=0, token_ids=(1,), logprobs=(logprob,)
    )


def test_one_step_makes_one_message_for_each_ingress() -> None:
    grouped = by_subject([("a", event("1")), ("b", event("2")), ("a", event("3"))])
    assert {subject: [e.request_id for e in events] for subject, events in grouped.items()} == {
        "a": ["1", "3"],
        "b": ["2"],
    }


def test_a_step_too_big_for_one_message_is_split_in_order_and_only_the_impossible_event_is_left_out() -> None:
    events = [event(str(number), tops=20) for number in range(8)]
    events[5] = event("5", tops=2000)
    refused: list[SequenceEvent] = []
    messages = [StepEvents.decode(data) for data in encoded(WORKER, events, 1000, refused.append)]
    assert [e.request_id for message in messages for e in message.events] == ["0", "1", "2", "3", "4", "6", "7"]
    assert all(len(message.encode()) <= 1000 for message in messages)
    assert [e.request_id for e in refused] == ["5"]


def test_a_step_that_fits_is_one_message() -> None:
    events = [event(str(number)) for number in range(8)]
    assert len(list(encoded(WORKER, events, 1_000_000, lambda _: None))) == 1
