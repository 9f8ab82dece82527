"""The planner and real workers together; what stands around them is in `isthmus_testing.worker_stack`."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

from isthmus_decode.role import DecodeRole
from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_shared.ids import Generation, Incarnation, IngressId, RequestId, WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import (
    IngressHeartbeat,
    ProcessState,
    Role,
)
from isthmus_shared.messages.route import Mode
from isthmus_shared.messages.work import (
    Ack,
    Cancel,
    FinishReason,
    SamplingParams,
    SubmitReply,
)
from isthmus_testing import eventually
from isthmus_testing.worker_stack import WAIT_S, alone, cluster, crossed, decode, prefill, until
from isthmus_worker.liveness import IngressLife


async def test_a_routed_request_crosses_and_gives_the_tokens_of_an_aggregated_one() -> None:
    async with cluster() as stack:
        await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE, kv_layout="hnd:64:fp32")
        route = await stack.routed()
        assert route.mode is Mode.DISAGGREGATED
        tokens, end = await crossed(stack, route)
        assert end.finish is FinishReason.LENGTH
        assert len(tokens) == 8
        assert tokens == await alone(stack, decoder.host.worker)
        assert decoder.host.sessions.idle.is_set()
        (transfer,) = stack.hub.transfers.values()
        told = [message.step for message in stack.messages if message.worker == decoder.host.worker and message.step]
        assert [step.kv_loads for step in told[:2]] == [1, 0], "the first step here took the KV in"
        assert [step.number for step in told] == list(range(1, len(told) + 1))
        assert all(before.ended_s <= after.ended_s for before, after in pairwise(told))
        assert (transfer.sealed, transfer.released) == (True, True)


async def test_fp8_of_one_vendor_is_decoded_by_the_other(tmp_path: Path) -> None:
    async with cluster() as stack:
        own = {"kind": EngineKind.REFERENCE, "model": ensure_tiny_checkpoint(tmp_path / "tiny")}
        await stack.worker("p", Role.PREFILL, kv_layout="nvidia-flash:fp8_e4m3fn", **own)
        decoder = await stack.worker("d", Role.DECODE, kv_layout="amd-shuffle:fp8_e4m3fnuz", **own)
        route = await stack.routed()
        assert route.mode is Mode.DISAGGREGATED, "both have one KV form"
        tokens, end = await crossed(stack, route)
        assert end.finish is FinishReason.LENGTH
        assert tokens == await alone(stack, decoder.host.worker)


async def test_the_planner_learns_from_the_steps_that_workers_tell() -> None:
    async with cluster() as stack:
        decoder = await stack.worker("d", Role.DECODE)
        for _ in range(2):
            await alone(stack, decoder.host.worker)

        async def told() -> bool:
            (beat,) = (await stack.view()).workers
            return beat.load.steps_total >= 10

        await until(told)
        (beat,) = (await stack.view()).workers
        assert all(sample.step_s > 0 for sample in beat.load.steps)
        assert 1 in {sample.decode_sequences for sample in beat.load.steps}
        predicted = (await stack.routed()).predicted
        usual_s = sorted(sample.step_s for sample in beat.load.steps)[len(beat.load.steps) // 2]
        assert usual_s / 2 < predicted.itl_p50_s < 2 * usual_s


async def test_many_sequences_of_one_step_travel_in_one_message() -> None:
    async with cluster() as stack:
        worker = (await stack.worker("d", Role.DECODE)).host.worker
        for number in range(6):
            submit = decode(worker, None, request_id=RequestId(f"r{number}"))
            await stack.ask(subjects.worker_decode(worker.worker_id), submit, SubmitReply)
        ended = 0
        while ended < 6:
            ended += (await stack.next_event()).finish is not None
        assert max(len(message.events) for message in stack.messages) == 6
        assert len(stack.messages) < 6 * 8


async def test_a_worker_without_its_relay_serves_alone_and_is_paired_again_when_the_relay_is_back() -> None:
    async with cluster() as stack:
        await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE)
        first = stack.hub.links[WorkerId("d")]
        first.lost.set()
        modes = [Mode.AGGREGATED, Mode.DISAGGREGATED]

        async def mode_reached() -> bool:
            if (await stack.routed()).mode is modes[0]:
                modes.pop(0)
            return not modes

        await until(mode_reached)
        assert stack.hub.links[WorkerId("d")] is not first
        assert decoder.runtime.state is ProcessState.READY


async def test_a_draining_worker_finishes_what_runs_refuses_the_rest_and_says_farewell() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE)
        subject = subjects.worker_decode(worker.host.worker.worker_id)
        await stack.ask(subject, decode(worker.host.worker, None), SubmitReply)
        await stack.next_event()
        worker.runtime.stopping.set()
        await eventually(lambda: worker.runtime.state is ProcessState.DRAINING)
        late = await stack.ask(subject, decode(worker.host.worker, None, request_id=RequestId("late")), SubmitReply)
        assert late.fault is not None
        assert late.fault.code == "draining"
        tokens, end = await stack.rest()
        assert (end.finish, len(tokens)) == (FinishReason.LENGTH, 7)
        async with asyncio.timeout(WAIT_S):
            await worker.task
        await eventually(lambda: bool(stack.lost))
        assert (stack.lost[0].worker, stack.lost[0].why) == (worker.host.worker, "draining")
        refused = await stack.route()
        assert refused.fault is not None
        assert refused.fault.code == "unavailable"


async def test_a_drain_has_an_end_even_if_its_requests_have_none() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, drain_s=0.05, sim_decode_base_s=0.02)
        submit = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=900, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), submit, SubmitReply)
        await stack.next_event()
        worker.runtime.stopping.set()
        tokens, end = await stack.rest()
        assert end.fault is not None
        assert (end.finish, end.fault.code) == (FinishReason.ERROR, "draining")
        assert end.output_index == 1 + len(tokens), "where its ingress waits, or the fault would pass for a duplicate"
        async with asyncio.timeout(WAIT_S):
            await worker.task


async def test_a_worker_that_falls_silent_is_reported_and_no_longer_routed_to() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE)
        worker.task.cancel()
        await eventually(lambda: bool(stack.lost))
        assert (await stack.view()).workers == ()


async def test_requests_of_an_ingress_that_is_gone_are_aborted() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.02)
        worker.host.sessions.life = IngressLife(lost_s=1.0)
        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        subject = subjects.worker_decode(WorkerId("d"))
        await stack.ask(subject, decode(worker.host.worker, None, sampling=endless), SubmitReply)
        kept = decode(worker.host.worker, None, sampling=endless, request_id=RequestId("k"), events_subject="other")
        await stack.ask(subject, kept, SubmitReply)
        beat = IngressHeartbeat(
            incarnation=Incarnation("x"),
            state=ProcessState.READY,
            interval_s=0.05,
            ingress_id=IngressId("o"),
            events_subject="other",
            requests_in_flight=1,
        )
        held = worker.host.sessions.requests

        async def ended() -> bool:
            await stack.bus.publish(subjects.HEARTBEAT_INGRESS, beat.encode())
            await stack.view()
            return held.find(RequestId("r"), Generation(1)) is None

        await until(ended)
        assert held.find(RequestId("k"), Generation(1)) is not None


async def test_a_cancel_frees_the_engine_and_both_ends_of_the_transfer() -> None:
    async with cluster() as stack:
        prefiller = await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE)
        route = await stack.routed()
        reply = await stack.ask(subjects.worker_prefill(WorkerId("p")), prefill(route), SubmitReply)
        await stack.ask(subjects.worker_decode(WorkerId("d")), decode(route.decode, reply.ticket), SubmitReply)
        await stack.next_event()
        for worker in (prefiller.host.worker, decoder.host.worker):
            message = Cancel(request_id=RequestId("r"), generation=Generation(1), incarnation=worker.incarnation)
            ack = await stack.ask(subjects.worker_cancel(worker.worker_id), message, Ack)
            assert ack.fault is None
        await eventually(lambda: prefiller.host.sessions.idle.is_set() and decoder.host.sessions.idle.is_set())
        for name in ("p", "d"):
            assert stack.hub.links[WorkerId(name)].aborted == [("t", 1)]
        assert len(decoder.host.sessions.requests) == len(prefiller.host.sessions.requests) == 0
        for worker_beat in (prefiller.host.beat(), decoder.host.beat()):
            assert worker_beat.load.kv_blocks_free == worker_beat.load.kv_blocks_total


async def test_a_role_can_be_taken_away_and_given_back_while_its_streams_run_on() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.02)
        await stack.ask(subjects.worker_decode(WorkerId("d")), decode(worker.host.worker, None), SubmitReply)
        worker.host.desk.detach(Role.DECODE)
        tokens, end = await stack.rest()
        assert (len(tokens), end.finish) == (8, FinishReason.LENGTH)
        assert worker.host.beat().roles == ()
        await worker.host.desk.attach(DecodeRole())
        assert len(await alone(stack, worker.host.worker)) == 8


async def test_an_outage_of_the_bus_in_mid_stream_leaves_no_gap() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.01)
        submit = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), submit, SubmitReply)
        indexes = [(await stack.next_event()).output_index]
        stack.broker.disconnect()
        await eventually(lambda: worker.host.sessions.idle.is_set())
        assert stack.events.qsize() < 10, "the rest was computed while nobody could hear it"
        stack.broker.reconnect()
        while len(indexes) < 20:
            indexes.append((await stack.next_event()).output_index)
        assert indexes == list(range(20))
