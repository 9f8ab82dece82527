"""The scheduler under any order of submits, arrivals, steps, aborts and failures."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.scheduler import Scheduler, SchedulerLimits
from isthmus_shared.engines.sequence import Batch, Phase, Sequence
from isthmus_shared.errors import ContextTooLong, NoCapacity
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import SamplingParams

BLOCK_TOKENS = 4
TOKEN = 1


class SchedulerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(blocks=st.integers(1, 6), running=st.integers(1, 4), chunk=st.integers(1, 9), waiting=st.integers(2, 8))
    def begin(self, blocks: int, running: int, chunk: int, waiting: int) -> None:
        self.limits = SchedulerLimits(
            block_tokens=BLOCK_TOKENS,
            blocks_total=blocks,
            max_model_len_tokens=22,
            max_running=running,
            prefill_chunk_tokens=chunk,
            max_waiting=waiting,
        )
        self.scheduler = Scheduler(self.limits)
        self.alive: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}
        self.names = 0

    @rule(
        target=sequences,
        prompt=st.integers(1, 12),
        output=st.integers(1, 12),
        kind=st.sampled_from(["whole", "save", "load"]),
    )
    def submit(self, prompt: int, output: int, kind: str) -> Sequence | None:
        self.names += 1
        transfer = MemoryKvTransfer(1)
        request = EngineRequest(
            RequestId(f"r{self.names}"),
            (TOKEN,) * prompt,
            SamplingParams(max_tokens=output),
            kv_save=transfer.sink if kind == "save" else None,
            kv_load=transfer.source if kind == "load" else None,
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

    def _entered(self, sequence: Sequence, entered: bool) -> None:
        if entered and sequence.request.sampling.max_tokens == 1:
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
            self.scheduler.commit(batch, {})
            for sequence in list(self.scheduler.running):
                self._finish(sequence)

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        assert all(sequence.phase is Phase.DONE for sequence in self.ended.values())
        loading = [s for s in self.alive.values() if s.phase is Phase.LOADING]
        assert all(not s.blocks and not (s.source_ready and s.first_token_known) for s in loading)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
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
        oldest = self.scheduler.running[:1]
        batch = self.scheduler.schedule()
        assert all(sequence.phase is Phase.RUNNING for sequence in oldest), "the oldest gave way to a younger one"
        assert batch.prefill_tokens <= self.limits.prefill_chunk_tokens
        assert len({work.sequence.uid for work in batch.works}) == len(batch.works) <= self.limits.max_running
        for work in batch.works:
            assert len(work.tokens) > 0
            assert len(work.block_table) * BLOCK_TOKENS >= work.end, "a token would be written outside its blocks"
            assert work.prefill or work.sample, "a decode that gives no token"
            assert not work.load or work.start == work.sequence.prompt_tokens
        tables = [block for work in batch.works for block in work.block_table]
        assert len(set(tables)) == len(tables), "two sequences write one block"
        decoding = [s for s in self.scheduler.running if not s.prefilling]
        assert {s.uid for s in decoding} <= {work.sequence.uid for work in batch.works}, "a decode was left out"
        return batch

    def _step(self) -> int:
        batch = self._scheduled()
        if not batch.works:
            return 0
        self.scheduler.commit(batch, {w.sequence.uid: TOKEN for w in batch.works if w.sample})
        for work in batch.works:
            sequence = work.sequence
            saved = sequence.request.kv_save is not None
            if work.sample and (saved or sequence.next_output_index >= sequence.request.sampling.max_tokens):
                self._finish(sequence)
        return len(batch.works)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.ended[sequence.uid] = self.alive.pop(sequence.uid)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
