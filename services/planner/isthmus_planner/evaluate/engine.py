"""One simulated engine: continuous batching with chunked prefill, in virtual time. Deterministic; no clock, no loop.

The rules are those of `isthmus_shared.engines.scheduler`, to the token instead of the block: decoding sequences first,
then prompts, oldest first, within a step's budget; a sequence is admitted only with room for all tokens that it has;
when there is none left for a decoding one, the youngest is preempted and computes its tokens anew later.
Between two admissions or ends the steps of a batch have a closed form, so that a run of them is one event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus_planner.sim.hardware import DecodeTable, PrefillTable
from isthmus_shared.messages.health import MAX_STEP_SAMPLES, StepSample, WorkerLoad

BLOCK_TOKENS = 16
"""Of the heartbeats' KV blocks."""
RECENT_STEPS = 32
"""Steps of the means that a heartbeat tells, as in `isthmus_shared.engines.reports`."""
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class EngineSpec:
    prefill: PrefillTable
    """Its `base_s` is a prompt's latency before it enters the queue; it holds nobody else up."""
    decode: DecodeTable
    kv_capacity_tokens: int
    chunk_tokens: int = 2048
    """Prompt tokens in a step."""
    interference: float = 1.0
    """Of a chunk's time, what comes on top of a decode step in one step with it."""


@dataclass(slots=True)
class Sequence:
    """A request's part on one engine."""

    number: int
    isl_tokens: int
    osl_tokens: int
    prefill_only: bool = False
    """Its KV leaves once the prompt is computed."""
    loaded: bool = False
    """Its KV came from elsewhere, with the first token."""
    left_tokens: int = 0
    """Of the prompt, still to be computed."""
    context_tokens: int = 0
    made_tokens: int = 0
    order: int = 0


@dataclass(slots=True)
class Effects:
    """Of one advance, all at the moment of it."""

    first: list[Sequence] = field(default_factory=list)
    """Have their first token."""
    prefilled: list[Sequence] = field(default_factory=list)
    """Of these, those whose KV leaves."""
    finished: list[Sequence] = field(default_factory=list)


class Engine:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.slowdown = 1.0
        """All steps that begin now take so many times as long."""
        self._slowdown_next = 1.0
        self.preemptions = 0
        self.wake_s = NEVER
        """When `advance` is due."""
        self.loading = 0
        """Sequences whose KV is still to come; kept by whoever brings it."""
        self.announced = 0
        """Prompts within their `base_s`: submitted, not yet in the queue."""
        self.announced_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._kv_tokens = self._context_tokens = self._order = 0
        self._chunk: list[tuple[Sequence, int]] = []
        self._run_begin_s = self._run_a_s = 0.0
        self._run_steps = 0
        """Decode steps under way as one run; 0: a step with prompts in it, or nothing."""
        self._steps_total = 0
        self._samples: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self._decode_means: deque[float] = deque(maxlen=RECENT_STEPS)
        self._prefill_means: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self.loading or self.announced)

    def submit(self, sequence: Sequence, now_s: float) -> None:
        self._order += 1
        sequence.order = self._order
        if sequence.loaded:
            sequence.context_tokens, sequence.made_tokens = sequence.isl_tokens, 1
        else:
            sequence.left_tokens = sequence.isl_tokens
        self._waiting.append(sequence)
        if self.wake_s is NEVER:
            self._begin(now_s)
        elif self._run_steps and self._fits(self._waiting[0]):
            self._cut_run(now_s)

    def advance(self, now_s: float) -> Effects:
        """The step, or the run of steps, that was under way has ended."""
        effects = Effects()
        if self._run_steps:
            self._end_run(self._run_steps, effects)
        else:
            self._end_mixed(now_s, effects)
        self._begin(now_s)
        return effects

    def slow_down(self, factor: float, now_s: float) -> None:
        """All steps from the next one on take so many times as long: heat, a neighbour."""
        self._slowdown_next = factor
        if self.wake_s is NEVER:
            self.slowdown = factor
        elif self._run_steps:
            self._cut_run(now_s)

    def load(self, now_s: float) -> WorkerLoad:
        """As a heartbeat tells it: the steps that have ended by now, the work that waits."""
        done = self._steps_done(now_s) if self._run_steps else 0
        samples = (*self._samples, *self._run_samples(done))[-MAX_STEP_SAMPLES:]
        kv_blocks = -(-(self._kv_tokens + done * len(self._decoding)) // BLOCK_TOKENS)
        total = self.spec.kv_capacity_tokens // BLOCK_TOKENS
        left = sum(s.left_tokens for s in self._prefilling) + sum(s.left_tokens for s in self._waiting)
        decode_s = [*self._decode_means, *(sample.step_s for sample in self._run_samples(done))][-RECENT_STEPS:]
        prefill_s = sum(step_s for _, step_s in self._prefill_means)
        return WorkerLoad(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting) + self.announced,
            loading=self.loading,
            queued_prefill_tokens=left + self.announced_tokens,
            kv_blocks_total=total,
            kv_blocks_free=max(0, total - kv_blocks),
            decode_step_s=sum(decode_s) / len(decode_s) if decode_s else None,
            prefill_tokens_per_s=sum(n for n, _ in self._prefill_means) / prefill_s if prefill_s else None,
            steps_total=self._steps_total + done,
            steps=samples,
        )

    def check_invariants(self) -> None:
        decoding = sum(s.context_tokens for s in self._decoding)
        assert decoding == self._context_tokens
        held = decoding + sum(s.isl_tokens + s.made_tokens for s in self._prefilling)
        assert held == self._kv_tokens <= self.spec.kv_capacity_tokens

    # -- what comes next --------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        self._admit()
        self._run_steps, self.wake_s, self.slowdown = 0, NEVER, self._slowdown_next
        if self._prefilling:
            self._begin_mixed(now_s)
        elif self._decoding:
            self._begin_run(now_s)

    def _admit(self) -> None:
        budget = self.spec.chunk_tokens - sum(s.left_tokens for s in self._prefilling)
        passed: list[Sequence] = []
        while self._waiting and self._fits(self._waiting[0]):
            sequence = self._waiting.popleft()
            if sequence.loaded:
                self._kv_tokens += sequence.context_tokens
                self._join(sequence)
            elif budget > 0:
                budget -= sequence.left_tokens
                self._kv_tokens += sequence.isl_tokens + sequence.made_tokens
                self._prefilling.append(sequence)
            else:
                passed.append(sequence)
        self._waiting.extendleft(reversed(passed))

    def _fits(self, sequence: Sequence) -> bool:
        seats = len(self._prefilling) + len(self._decoding) < self.spec.decode.max_batch
        room = self.spec.kv_capacity_tokens - self._kv_tokens - len(self._decoding)
        return seats and sequence.isl_tokens + sequence.made_tokens + 1 <= room

    def _join(self, sequence: Sequence) -> None:
        self._decoding.append(sequence)
        self._context_tokens += sequence.context_tokens

    def _decode_step_s(self) -> float:
        return self.spec.decode.step_s(len(self._decoding), self._context_tokens) if self._decoding else 0.0

    def _begin_mixed(self, now_s: float) -> None:
        self._make_room(1)
        budget, work_s, tokens = self.spec.chunk_tokens, 0.0, 0
        table = self.spec.prefill
        for sequence in self._prefilling:
            count = min(budget, sequence.left_tokens)
            if count == 0:
                break
            before = sequence.isl_tokens + sequence.made_tokens - sequence.left_tokens
            self._chunk.append((sequence, count))
            work_s += table.token_s * count + table.pair_s * count * (before + 0.5 * count)
            budget, tokens = budget - count, tokens + count
        took_s = max(table.floor_s, work_s) + table.extra_token_s * tokens
        if self._decoding:
            took_s = self._decode_step_s() + self.spec.interference * took_s
        self._run_begin_s, self.wake_s = now_s, now_s + took_s * self.slowdown

    def _end_mixed(self, now_s: float, effects: Effects) -> None:
        decoding, tokens = list(self._decoding), sum(count for _, count in self._chunk)
        chunk, self._chunk = self._chunk, []
        self._generate(decoding, 1, effects)
        for sequence, count in chunk:
            sequence.left_tokens -= count
            if sequence.left_tokens == 0:
                self._prefilling.remove(sequence)
                self._prompt_done(sequence, effects)
        step_s = now_s - self._run_begin_s
        self._note(step_s, len(decoding), tokens, self._kv_tokens)
        self._prefill_means.append((tokens, step_s))

    def _prompt_done(self, sequence: Sequence, effects: Effects) -> None:
        held = sequence.isl_tokens + sequence.made_tokens
        if sequence.made_tokens == 0:
            sequence.made_tokens = 1
            effects.first.append(sequence)
        if sequence.prefill_only or sequence.made_tokens >= sequence.osl_tokens:
            self._kv_tokens -= held
            (effects.prefilled if sequence.prefill_only else effects.finished).append(sequence)
            return
        sequence.context_tokens = held
        self._join(sequence)

    # -- runs of decode steps ---------------------------------------------------------------------------------------

    def _begin_run(self, now_s: float) -> None:
        self._make_room(1)
        batch = len(self._decoding)
        room = (self.spec.kv_capacity_tokens - self._kv_tokens) // batch
        ends = min(s.osl_tokens - s.made_tokens for s in self._decoding)
        self._run_steps = max(1, min(room, ends))
        self._run_begin_s, self._run_a_s = now_s, self._decode_step_s()
        self.wake_s = now_s + self._run_s(self._run_steps)

    def _run_s(self, steps: int) -> float:
        growth_s = self.spec.decode.b_s_per_token * len(self._decoding)
        return self.slowdown * (steps * self._run_a_s + growth_s * steps * (steps - 1) / 2)

    def _steps_done(self, now_s: float) -> int:
        """Whole steps of the run by now: the root of a quadratic, then exactly."""
        elapsed_s = now_s - self._run_begin_s
        half_s = self.slowdown * self.spec.decode.b_s_per_token * len(self._decoding) / 2
        first_s = self.slowdown * self._run_a_s - half_s
        root = 2 * elapsed_s / (first_s + math.sqrt(first_s * first_s + 4 * half_s * elapsed_s))
        done = min(self._run_steps, int(root))
        while done < self._run_steps and self._run_s(done + 1) <= elapsed_s:
            done += 1
        while done and self._run_s(done) > elapsed_s:
            done -= 1
        return done

    def _cut_run(self, now_s: float) -> None:
        """Somebody may join: the run ends with the step under way."""
        self._run_steps = max(1, min(self._run_steps, self._steps_done(now_s) + 1))
        self.wake_s = self._run_begin_s + self._run_s(self._run_steps)

    def _end_run(self, steps: int, effects: Effects) -> None:
        for sample in self._run_samples(steps):
            self._samples.append(sample)
            self._decode_means.append(sample.step_s)
        self._steps_total += steps
        self._generate(list(self._decoding), steps, effects)

    def _run_samples(self, done: int) -> Iterator[StepSample]:
        """The latest steps of the run, of which so many have ended."""
        batch = len(self._decoding)
        for step in range(max(0, done - MAX_STEP_SAMPLES), done):
            yield StepSample(
                step_s=self._run_s(step + 1) - self._run_s(step),
                decode_sequences=batch,
                prefill_tokens=0,
                kv_tokens=self._kv_tokens + (step + 1) * batch,
            )

    def _generate(self, decoding: list[Sequence], steps: int, effects: Effects) -> None:
        for sequence in decoding:
            sequence.made_tokens += steps
            sequence.context_tokens += steps
        self._kv_tokens += steps * len(decoding)
        self._context_tokens += steps * len(decoding)
        for sequence in decoding:
            if sequence.made_tokens >= sequence.osl_tokens:
                self._leave(sequence)
                effects.finished.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._decoding.remove(sequence)
        self._kv_tokens -= sequence.context_tokens
        self._context_tokens -= sequence.context_tokens

    def _make_room(self, steps: int) -> None:
        while self._decoding and self._kv_tokens + steps * len(self._decoding) > self.spec.kv_capacity_tokens:
            victim = max(self._decoding, key=lambda s: s.order)
            self._leave(victim)
            victim.loaded, victim.left_tokens = False, victim.isl_tokens + victim.made_tokens
            self._waiting.appendleft(victim)
            self.preemptions += 1

    def _note(self, step_s: float, sequences: int, tokens: int, kv_tokens: int) -> None:
        self._steps_total += 1
        self._samples.append(
            StepSample(step_s=step_s, decode_sequences=sequences, prefill_tokens=tokens, kv_tokens=kv_tokens)
        )
        if sequences:
            self._decode_means.append(step_s)
