"""Sequences that are given away: asked for, taken out between two steps, copied out piece by piece, or let go on."""

from __future__ import annotations

import asyncio

from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.engines.scheduler import Scheduler
from isthmus_shared.engines.sequence import Batch, Phase, Sequence
from isthmus_shared.errors import Fault, IsthmusError, ManifestMismatch, StaleParty, Unavailable


class Giving:
    """Of one engine. `take`, `keep` and `step_failed` are called between two steps, the others at any time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._asked: list[tuple[Sequence, asyncio.Future[int]]] = []
        self._let_go: list[Sequence] = []

    def asked(self, sequence: Sequence) -> asyncio.Future[int]:
        """Resolved by the next `take`: the tokens whose KV it has."""
        wanted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append((sequence, wanted))
        return wanted

    def take(self) -> None:
        """Between two steps: take out who was asked for, and can be; let those go on that are not wanted any more."""
        let_go, self._let_go = self._let_go, []
        for sequence in let_go:
            if sequence.phase is Phase.PAUSED and sequence.given_to is None:
                self._scheduler.resume(sequence)
        asked, self._asked = self._asked, []
        for sequence, wanted in asked:
            if wanted.done():
                continue  # who asked has given up
            if sequence.phase is Phase.DONE:
                wanted.set_exception(StaleParty("the sequence has ended"))
            elif not sequence.decoding:
                wanted.set_exception(Unavailable("the sequence does not decode", why=f"it is {sequence.phase.value}"))
            else:
                self._scheduler.pause(sequence)
                wanted.set_result(sequence.computed)

    def give_up(self, error: IsthmusError) -> None:
        """The engine is over."""
        asked, self._asked = self._asked, []
        for _, wanted in asked:
            if not wanted.done():
                wanted.set_exception(error)

    def save(self, sequence: Sequence, sink: KvSink, *, total_bytes: int) -> None:
        """Raises `StaleParty` or `ManifestMismatch`; then the sink is still the caller's."""
        if sequence.phase is not Phase.PAUSED or sequence.given_to is not None:
            raise StaleParty("the sequence is not paused", why=f"it is {sequence.phase.value}")
        if sink.total_bytes != total_bytes:
            raise ManifestMismatch(
                "the transfer's size is not this sequence's KV",
                why=f"here {total_bytes} bytes, there {sink.total_bytes}",
                param="total_bytes",
            )
        sequence.given_to, sequence.saved = sink, 0

    def resume(self, sequence: Sequence) -> None:
        """At the next `take`."""
        self._let_go.append(sequence)

    def keep(self, sequence: Sequence, fault: Fault) -> None:
        """It could not be copied out: it goes on here as if nobody had asked."""
        sink, sequence.given_to = sequence.given_to, None
        assert sink is not None, "nothing was being copied"
        sink.abort(fault)
        self._scheduler.resume(sequence)

    def step_failed(self, batch: Batch, fault: Fault) -> None:
        """A step broke that copied something out: what it wrote is unknown, what it copied from is as it was."""
        for work in batch.works:
            if work.copies:
                self.keep(work.sequence, fault)
