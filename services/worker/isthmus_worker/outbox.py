"""From one engine step to the messages that it makes: one per ingress, split only where a message would be too big."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from isthmus_shared.messages.work import SequenceEvent, StepEvents, StepFacts, WorkerRef

Addressed = tuple[str, SequenceEvent]
"""An event and the subject of the ingress that waits for it."""


def by_subject(events: Iterable[Addressed]) -> dict[str, list[SequenceEvent]]:
    grouped: dict[str, list[SequenceEvent]] = {}
    for subject, event in events:
        grouped.setdefault(subject, []).append(event)
    return grouped


def encoded(
    worker: WorkerRef,
    events: list[SequenceEvent],
    max_bytes: int,
    oversized: Callable[[SequenceEvent], None],
    step: StepFacts | None = None,
) -> Iterator[bytes]:
    """The events as messages of at most `max_bytes`, in order. One event that is too big alone goes to `oversized`."""
    data = StepEvents(worker=worker, events=tuple(events), step=step).encode()
    if len(data) <= max_bytes:
        yield data
        return
    if len(events) == 1:
        oversized(events[0])
        return
    middle = len(events) // 2
    yield from encoded(worker, events[:middle], max_bytes, oversized, step)
    yield from encoded(worker, events[middle:], max_bytes, oversized, step)
