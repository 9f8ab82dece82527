"""The scheduler under any order of submits, arrivals, steps, aborts and failures."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.scheduler import Scheduler, SchedulerLimits
from isthmus_shared.engines.sequence import Batch, Phase, Sequence, Work
from isthmus_shared.errors import ContextTooLong, NoCapacity
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import SamplingParams
from isthmus_testing.worker_parts import manifest

BLOCK_TOKENS = 4
TOKEN = 1


class SchedulerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        blocks=st.integers(1, 6),
        running=st.integers(1, 4),
        chunk=st.integers(1, 9),
        waiting=st.integers(2, 8),
        cache=st.sampled_from([True, True, True, False]),
    )
    def begin(self, blocks: int, running: int, chunk: int, waiting: int, cache: bool) -> None:
        self.limits = SchedulerLimits(
            block_tokens=BLOCK_TOKENS,
            blocks_total=blocks,
            max_model_len_tokens=22,
            max_running=running,
            prefill_chunk_tokens=chunk,
            max_waiting=waiting,
            prefix_cache=cache,
        )
        self.cells: dict[tuple[int, int], object] = {}
        """(block, place in it) → what was written there: (salt, position, token), or the sequence that loaded it."""
        self.scheduler = Scheduler(self.limits)
        self.alive: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}
        self.names = 0

    @rule(
        target=sequences,
        prompt=st.integers(1, 12),
        other=st.sampled_from([0, 0, 0, 5, 9]),
        salt=st.sampled_from(["", "", "other"]),
        output=st.integers(1, 12),
        kind=st.sampled_from(["whole", "save", "load", "resume"]),
    )
    def submit(self, prompt: int, other: int, salt: str, output: int, kind: str) -> Sequence | None:
        """The prompt's tokens are all alike but for the one at `other`, so that many prompts share a beginning."""
        self.names += 1
        transfer = MemoryKvTransfer(1)
        request = EngineRequest(
            RequestId(f"r{self.names}"),
            tuple(TOKEN + (0 < other == i) for i in range(prompt)),
            SamplingParams(max_tokens=output),
            kv_save=transfer.sink if kind == "save" else None,
            kv_load=transfer.source if kind in ("load", "resume") else None,
            kv_manifest=manifest(max(1, prompt // 2)) if kind == "resume" else None,
            cache_salt=salt,
        )
        worst = prompt if kind == "save" else prompt + output - 1
        never = prompt + output > 22 or -(-worst // BLOCK_TOKENS) > self.limits.blocks_total
        full = len(self.scheduler.waiting) + len(self.scheduler.loading) >= self.limits.max_waiting
        try:
            sequence = self.scheduler.submit(request)
        except ContextTooLong:
            assert never
            return None
        except NoCapacity:
            assert full
            assert not never
            return None
        assert not never
        assert not full
        self.alive[sequence.uid] = sequence
        return sequence

    @rule(sequence=sequences)
    def kv_arrives(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.request.kv_load is not None:
            self._entered(sequence, self.scheduler.source_ready(sequence))

    @rule(sequence=sequences)
    def first_token_arrives(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.request.kv_load is not None:
            self._entered(sequence, self.scheduler.first_token(sequence, TOKEN))

    @rule(sequence=sequences)
    def pause(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.decoding:
            self.scheduler.pause(sequence)

    @rule(sequence=sequences)
    def let_go_on(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.phase is Phase.PAUSED and sequence.given_to is None:
            self.scheduler.resume(sequence)

    @rule(sequence=sequences)
    def give_away(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.phase is Phase.PAUSED and sequence.given_to is None:
            sequence.given_to, sequence.saved = MemoryKvTransfer(1).sink, 0

    def _entered(self, sequence: Sequence, entered: bool) -> None:
        if entered and not sequence.request.resumes and sequence.request.sampling.max_tokens == 1:
            self._finish(sequence)

    @rule(sequence=sequences)
    def abort(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.uid in self.alive:
            self._finish(sequence)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()
            self.scheduler.check_invariants()

    @rule()
    def a_step_raises(self) -> None:
        batch = self._scheduled()
        if batch.works:
            self.scheduler.commit(batch, {}, {work.sequence.uid for work in batch.works})
            for work in batch.works:
                if work.copies:  # it goes on where it is
                    work.sequence.given_to = None
                    self.scheduler.resume(work.sequence)
            for sequence in list(self.scheduler.running):
                self._finish(sequence)
            self.scheduler.distrust()
            assert len(self.scheduler.pool.prefixes) == self.scheduler.pool.idle == 0

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        assert all(sequence.phase is Phase.DONE for sequence in self.ended.values())
        loading = [s for s in self.alive.values() if s.phase is Phase.LOADING]
        assert all(not s.blocks and not (s.source_ready and s.first_token_known) for s in loading)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for sequence in list(self.scheduler.paused.values()):
            self.let_go_on(sequence)
        for sequence in list(self.scheduler.loading.values()):
            self.kv_arrives(sequence)
            self.first_token_arrives(sequence)
        # Work left: each step computes at least one token, and a preemption costs at most all tokens once more.
        for _ in range(20_000):
            if not self.alive:
                break
            assert self._step() > 0, "sequences are alive, but nothing is scheduled"
        assert not self.alive, "a sequence starves"
        self.scheduler.check_invariants()
        assert self.scheduler.pool.free == self.limits.blocks_total

    def _scheduled(self) -> Batch:
        oldest = [] if self.scheduler.paused else self.scheduler.running[:1]
        batch = self.scheduler.schedule()
        assert all(sequence.phase is Phase.RUNNING for sequence in oldest), "the oldest gave way to a younger one"
        assert batch.prefill_tokens <= self.limits.prefill_chunk_tokens
        assert len({work.sequence.uid for work in batch.works}) == len(batch.works) <= self.limits.max_running
        for work in batch.works:
            assert len(work.tokens) > 0
            assert len(work.block_table) * BLOCK_TOKENS >= work.end, "a token would be written outside its blocks"
            assert work.prefill or work.sample or work.copies, "a decode that gives no token"
            assert not work.load or work.start == work.sequence.request.loaded_tokens
            assert not work.copies or work.end <= work.sequence.computed, "KV that was never computed is given away"
        written = [
            block
            for work in batch.works
            if not work.copies
            for block in work.block_table[self._first_written(work) // BLOCK_TOKENS :]
        ]
        assert len(set(written)) == len(written), "two sequences write one block"
        assert not any(self.scheduler.pool.shared(block) for block in written), "a block that others use is written"
        for work in batch.works:
            self._write(work)
        decoding = [s for s in self.scheduler.running if not s.prefilling]
        assert {s.uid for s in decoding} <= {work.sequence.uid for work in batch.works}, "a decode was left out"
        return batch

    @staticmethod
    def _first_written(work: Work) -> int:
        return work.end if work.copies else 0 if work.load else work.start

    def _write(self, work: Work) -> None:
        sequence, salt = work.sequence, work.sequence.request.cache_salt
        for position in range(self._first_written(work), work.end):
            place = work.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            loaded = work.load and position < work.start
            self.cells[place] = sequence.uid if loaded else (salt, position, sequence.tokens[position])
        for position in range(work.start):
            place = work.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            there = self.cells[place]
            assert there in (sequence.uid, (salt, position, sequence.tokens[position])), "KV of another prefix"

    def _step(self) -> int:
        batch = self._scheduled()
        if not batch.works:
            return 0
        self.scheduler.commit(batch, {w.sequence.uid: TOKEN for w in batch.works if w.sample})
        for work in batch.works:
            sequence = work.sequence
            if work.copies:
                if sequence.saved == sequence.computed:
                    self._finish(sequence)
                continue
            saved = sequence.request.kv_save is not None
            if work.sample and (saved or sequence.next_output_index >= sequence.request.sampling.max_tokens):
                self._finish(sequence)
        return len(batch.works)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.ended[sequence.uid] = self.alive.pop(sequence.uid)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
