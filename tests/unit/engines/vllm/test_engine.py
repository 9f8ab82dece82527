"""The engine's shell over a scripted core: what follows when vLLM refuses, fails, or is slow to let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.vllm.engine import VllmEngine
from isthmus_shared.engines.vllm.flows import FlowTable
from isthmus_shared.engines.vllm.turns import CoreInfo, NewRequest, Progress, TokenLine, Turn
from isthmus_shared.errors import EngineFailed
from isthmus_shared.ids import Generation, RequestId, TransferId
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.shape import KvShape, group_layers
from isthmus_shared.messages.work import FinishReason
from isthmus_testing.engines import Harness, ask, prompt_of, running

SHAPE = KvShape(model_fingerprint="f", dtype=KvDtype.FP32, groups=group_layers([None], kv_heads=1, head_dim=2))
INFO = CoreInfo(SHAPE, 512, 256, frozenset({7}), 16, 32, "scripted", "0")


class ScriptedCore:
    """Gives each request one token a turn, and lets go of it `hold` turns after its end."""

    def __init__(self, *, hold: int = 0, fail_at: int | None = None, refuse: str | None = None) -> None:
        self.info, self.flows = INFO, FlowTable()
        self._hold, self._fail_at, self._refuse = hold, fail_at, refuse
        self._left: dict[str, int] = {}
        self._ending: dict[str, int] = {}
        self.turns = 0
        self.closed = False

    def turn(self, new: Sequence[NewRequest], aborted: Sequence[str]) -> Turn:
        self.turns += 1
        if self.turns == self._fail_at:
            raise RuntimeError("the device is gone")
        for name in aborted:
            if self._left.pop(name, None) is not None:
                self._ending[name] = self._hold
        refused = tuple((one.name, self._refuse) for one in new if self._refuse is not None)
        self._left |= {one.name: one.params["max_tokens"] for one in new if self._refuse is None}
        progress = tuple(self._step(name) for name in list(self._left))
        released = frozenset(name for name, turns in self._ending.items() if turns == 0)
        self._ending = {name: turns - 1 for name, turns in self._ending.items() if turns > 0}
        return Turn(
            progress, refused, released, 0.001, 1, len(progress), 0, 0, 32 - len(self._left) - len(self._ending), 0,
            not self._left and not self._ending,
        )  # fmt: skip

    def _step(self, name: str) -> Progress:
        self._left[name] -= 1
        finish = None if self._left[name] else "length"
        if finish:
            del self._left[name]
            self._ending[name] = self._hold
        return Progress(name, (TokenLine(65),), finish, 0)

    def close(self) -> None:
        self.closed = True


Start = Callable[[ScriptedCore], AbstractAsyncContextManager[Harness]]


@pytest.fixture
def start() -> Start:
    def make(core: ScriptedCore, **config: Any) -> AbstractAsyncContextManager[Harness]:
        fields: dict[str, Any] = {"kind": EngineKind.VLLM, "model_name": "m"} | config
        return running(VllmEngine(EngineConfig(**fields), lambda _: core))  # type: ignore[arg-type, return-value]

    return make


async def test_tokens_come_with_their_index_and_an_end(start: Start) -> None:
    async with start(ScriptedCore()) as engine:
        got = await engine.run(ask("r", prompt_of(5), max_tokens=4))
        assert (got.tokens, got.indexes, got.finish) == ([65] * 4, [0, 1, 2, 3], FinishReason.LENGTH)
        engine.assert_empty()


async def test_an_end_is_told_only_when_vllm_has_let_go(start: Start) -> None:
    core = ScriptedCore(hold=5)
    async with start(core) as engine:
        await engine.run(ask("r", prompt_of(5), max_tokens=1))
        assert core.turns >= 6
        engine.assert_empty()


async def test_a_request_that_vllm_refuses_ends_with_its_words(start: Start) -> None:
    async with start(ScriptedCore(refuse="no such thing")) as engine:
        got = await engine.run(ask("r", prompt_of(5)))
        assert got.finish is FinishReason.ERROR
        assert got.fault is not None
        assert (got.fault.code, got.fault.why) == ("invalid_request", "no such thing")
        engine.assert_empty()


async def test_when_a_step_fails_everyone_is_told_and_everything_is_given_back(start: Start) -> None:
    core = ScriptedCore(fail_at=3)
    async with start(core) as engine:
        saving, loading = engine.transfer(20), engine.transfer(20)
        engine.submit(ask("streams", prompt_of(5), max_tokens=100))
        engine.submit(ask("saves", prompt_of(20), save=saving, max_tokens=50))
        engine.submit(ask("loads", prompt_of(20), load=loading))
        for name in ("streams", "saves", "loads"):
            got = await engine.until(name)
            assert got.finish is FinishReason.ERROR
            assert got.fault is not None
            assert got.fault.code == "engine_failed"
        assert saving.fault is not None
        assert loading.released
        with pytest.raises(EngineFailed):
            engine.submit(ask("late", prompt_of(5)))
    assert core.closed


async def test_a_prefill_waits_for_its_seal(start: Start) -> None:
    core = ScriptedCore()
    async with start(core) as engine:
        transfer = engine.transfer(20)
        engine.submit(ask("r", prompt_of(20), save=transfer))
        engine.submit(ask("other", prompt_of(5), max_tokens=3))
        await engine.until("other")
        assert "r" not in engine.outcomes
        sink = await core.flows.open_sink(
            TransferId("isthmus-0"), Generation(1), SHAPE.manifest(20), deadline_s=1, wait_s=1
        )
        sink.map(0, sink.total_bytes)
        sink.filled(0, sink.total_bytes)
        sink.seal()
        got = await engine.until("r")
        assert (got.tokens, got.finish) == ([65], FinishReason.HANDOFF)
        engine.assert_empty()


async def test_an_abort_waits_for_whoever_writes_into_staging(start: Start) -> None:
    core = ScriptedCore()
    async with start(core) as engine:
        transfer = engine.transfer(20)
        engine.submit(ask("r", prompt_of(20), save=transfer))
        sink = await core.flows.open_sink(
            TransferId("isthmus-0"), Generation(1), SHAPE.manifest(20), deadline_s=1, wait_s=1
        )
        sink.map(0, 8)
        engine.engine.abort(RequestId("r"))
        await engine.run(ask("other", prompt_of(5), max_tokens=3))
        assert "r" not in engine.outcomes
        assert transfer.fault is None
        sink.filled(0, 8)
        assert (await engine.until("r")).finish is FinishReason.CANCELLED
        assert transfer.fault is not None
        engine.assert_empty()


async def test_stop_ends_everyone_and_closes_vllm(start: Start) -> None:
    core = ScriptedCore(hold=3)
    async with start(core) as engine:
        engine.submit(ask("r", prompt_of(5), max_tokens=400))
        await engine.until("r", tokens=1)
        await engine.engine.stop()
        assert (await engine.until("r")).finish is FinishReason.CANCELLED
        engine.assert_empty()
    assert core.closed
