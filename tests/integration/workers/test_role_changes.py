"""A worker becomes what the leader says, and no stream that it has notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_shared.errors import ConfigInvalid, Retry
from isthmus_shared.ids import Generation, RequestId, WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import ProcessState, Role
from isthmus_shared.messages.work import Ack, FinishReason, MoveRequests, SamplingParams, StartDecode, SubmitReply
from isthmus_testing import eventually
from isthmus_testing.worker_stack import Stack, Worker, alone, cluster, crossed, decode, prefill, until
from isthmus_worker.config import WorkerConfig

BOTH = (Role.PREFILL, Role.DECODE)
SLOW: dict[str, Any] = {"linger_s": 0.05, "sim_decode_base_s": 0.01}


async def assign(stack: Stack, worker: Worker, *roles: Role, epoch: int = 1, **fields: Any) -> Ack:
    message = AssignRoles(epoch=epoch, **({"incarnation": worker.runtime.incarnation, "roles": roles} | fields))
    return await stack.ask(subjects.worker_assign(worker.host.worker.worker_id), message, Ack)


async def test_a_decode_worker_becomes_a_prefill_worker_and_its_stream_runs_on() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, able=BOTH, **SLOW)
        long = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        assert (await stack.ask(subjects.worker_decode(WorkerId("d")), long, SubmitReply)).fault is None
        await stack.next_event()
        async with stack.bus.subscribe(subjects.MOVE_REQUESTS) as moves:
            assert (await assign(stack, worker, Role.PREFILL, epoch=3)).fault is None
            await eventually(lambda: worker.host.beat().roles == (Role.PREFILL,))
            assert MoveRequests.decode((await anext(moves)).data).worker == worker.host.worker
        assert worker.host.beat().epoch == 3
        tokens, end = await stack.rest()
        assert (end.finish, len(tokens)) == (FinishReason.LENGTH, 59)
        await eventually(lambda: worker.host.desk.settled)

        other = await stack.worker("d2", Role.DECODE)
        route = await stack.routed()
        assert route.prefill == worker.host.worker
        tokens, end = await crossed(stack, route)
        assert tokens == await alone(stack, other.host.worker)


async def test_what_was_routed_before_everyone_knew_is_taken_and_what_comes_later_refused() -> None:
    async with cluster() as stack:
        prefiller = await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE, able=BOTH, linger_s=0.5)
        route = await stack.routed()
        first = await stack.ask(subjects.worker_prefill(WorkerId("p")), prefill(route), SubmitReply)
        await assign(stack, decoder, Role.PREFILL)
        subject = subjects.worker_decode(WorkerId("d"))
        assert (await stack.ask(subject, decode(route.decode, first.ticket), SubmitReply)).fault is None
        handoff = await stack.next_event()
        await eventually(lambda: Role.DECODE in decoder.host.sessions.closed)
        late = await stack.ask(subject, decode(route.decode, None, request_id=RequestId("late")), SubmitReply)
        assert late.fault is not None
        assert late.fault.code == "draining"
        # The one that is in may still be started: its own subject stays until its end.
        start = StartDecode(
            request_id=RequestId("r"),
            generation=Generation(1),
            incarnation=route.decode.incarnation,
            first_token_id=handoff.token_ids[0],
        )
        assert (await stack.ask(subjects.worker_start(WorkerId("d")), start, Ack)).fault is None
        tokens, end = await stack.rest()
        assert (end.finish, len(tokens)) == (FinishReason.LENGTH, 7)
        await eventually(lambda: decoder.host.desk.settled)
        assert prefiller.host.beat().roles == (Role.PREFILL,)


async def test_an_assignment_of_an_older_leader_or_for_another_life_is_refused() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, able=BOTH, **SLOW)
        assert (await assign(stack, worker, *BOTH, epoch=7)).fault is None
        await eventually(lambda: worker.host.beat().roles == (Role.DECODE, Role.PREFILL))
        older = await assign(stack, worker, Role.PREFILL, epoch=6)
        other = await assign(stack, worker, Role.PREFILL, epoch=8, incarnation="another")
        assert older.fault is not None
        assert other.fault is not None
        assert (older.fault.code, other.fault.code) == ("stale_party", "stale_party")
        assert worker.host.beat().roles == (Role.DECODE, Role.PREFILL)
        assert worker.host.beat().epoch == 7
        # One that is refused for another reason proves all the same that its leader is the newer one.
        refused = await assign(stack, worker, Role.DECODE, epoch=9, model="nobody's")
        assert refused.fault is not None
        assert refused.fault.code == "invalid_request"
        assert (await assign(stack, worker, Role.DECODE, epoch=8)).fault is not None


async def test_a_role_that_a_worker_was_not_given_is_refused() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE)
        refused = await assign(stack, worker, Role.PREFILL)
        assert refused.fault is not None
        assert (refused.fault.code, refused.fault.param) == ("invalid_request", "roles")
        assert worker.host.beat().roles_able == (Role.DECODE,)


async def test_a_role_taken_back_before_it_ended_goes_on() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, able=BOTH, linger_s=30.0)
        await assign(stack, worker, Role.PREFILL)
        await eventually(lambda: worker.host.beat().roles == (Role.PREFILL,))
        await assign(stack, worker, Role.DECODE)
        await eventually(lambda: worker.host.beat().roles == (Role.DECODE,))
        assert len(await alone(stack, worker.host.worker)) == 8


async def test_a_worker_loads_another_model_once_its_streams_have_ended() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, models=("other=",), **SLOW)
        before = worker.host.beat()
        assert before.models_able == ("isthmus-demo", "other")
        long = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), long, SubmitReply)
        await stack.next_event()
        async with stack.bus.subscribe(subjects.MOVE_REQUESTS) as moves:
            assert (await assign(stack, worker, Role.DECODE, model="other")).fault is None
            await eventually(lambda: worker.runtime.state is ProcessState.DRAINING)
            assert MoveRequests.decode((await anext(moves)).data).worker == worker.host.worker
        tokens, end = await stack.rest()
        assert (end.finish, len(tokens)) == (FinishReason.LENGTH, 29)
        await eventually(lambda: worker.host.beat().model == "other" and worker.runtime.state is ProcessState.READY)
        after = worker.host.beat()
        assert after.model_fingerprint != before.model_fingerprint
        assert len(await alone(stack, worker.host.worker)) == 8
        await assign(stack, worker, Role.DECODE, model="isthmus-demo")
        await eventually(lambda: worker.host.beat().model_fingerprint == before.model_fingerprint)


async def test_streams_that_outlast_the_drain_are_planned_anew() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, models=("other=",), drain_s=0.05, **SLOW)
        endless = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=900, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), endless, SubmitReply)
        await stack.next_event()
        await assign(stack, worker, Role.DECODE, model="other")
        _, end = await stack.rest()
        assert end.fault is not None
        assert end.fault.code == "draining"
        assert end.fault.to_error().retry is not Retry.NEVER
        await eventually(lambda: worker.host.beat().model == "other" and worker.runtime.state is ProcessState.READY)
        assert worker.host.beat().load.kv_blocks_free == worker.host.beat().load.kv_blocks_total


async def test_a_model_that_cannot_be_loaded_leaves_the_worker_with_its_own(tmp_path: Path) -> None:
    async with cluster() as stack:
        folder = ensure_tiny_checkpoint(tmp_path / "model")
        settings = {"kind": EngineKind.REFERENCE, "model": folder, "kv_blocks": 16, "linger_s": 0.0}
        worker = await stack.worker("d", Role.DECODE, models=(f"broken={tmp_path / 'nothing'}",), **settings)
        tokens = await alone(stack, worker.host.worker)
        await assign(stack, worker, Role.DECODE, model="broken")
        await eventually(lambda: worker.runtime.state is not ProcessState.READY)

        async def back() -> bool:
            beats = (await stack.view()).workers
            return [(beat.model, beat.state) for beat in beats] == [("isthmus-demo", ProcessState.READY)]

        await until(back)
        assert await alone(stack, worker.host.worker) == tokens


def test_models_are_named_with_their_folders() -> None:
    environ = {"ISTHMUS_WORKER_ID": "w", "ISTHMUS_ENGINE_KIND": "reference", "ISTHMUS_ENGINE_MODEL_NAME": "one"}
    config = WorkerConfig.load({**environ, "ISTHMUS_WORKER_MODELS": "two=/models/two, three=/models/three"})
    assert config.model_names == ("one", "two", "three")
    assert config.engine_for("two").model_path == Path("/models/two")
    for wrong in ("two", "two=", "=x", "two=/a,two=/b"):
        with pytest.raises(ConfigInvalid, match="ISTHMUS_WORKER_MODELS"):
            WorkerConfig.load({**environ, "ISTHMUS_WORKER_MODELS": wrong})
