"""Transfers between two relays over real verbs, and what each fault of the fabric does to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
from structlog.testing import LogCapture

from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.transports.choice import TransportKind
from isthmus_kvrelay.transports.verbs.binding import Depths, PathSettings
from isthmus_kvrelay.transports.verbs.control_stream import Liveness
from isthmus_shared.errors import ChecksumMismatch, ConfigInvalid, IsthmusError, PartyLost, TransferFailed
from isthmus_shared.messages.work import RelayRef
from isthmus_testing import eventually
from isthmus_testing.rdma import Damaging, Link, NeverReady, Tampered, WrongKey, require_devices
from isthmus_testing.relay import (
    G1,
    SLOT_BYTES,
    Node,
    client_of,
    daemon_settings,
    manifest_of,
    new_transfer,
    pattern,
    read,
    running,
    ticket_for,
    write,
)

require_devices()

MIB = 1 << 20
SIZE = 12 * SLOT_BYTES
IMPATIENT = PathSettings(timeout=14, retries=2, rnr_retries=2)


@dataclasses.dataclass
class Pair:
    source: Node
    target: Node
    producer: RelayClient
    consumer: RelayClient
    log: LogCapture

    async def start(self, size: int = SIZE, *, filled: int | None = None, seal: bool = True) -> tuple[Any, Any]:
        transfer = new_transfer()
        sink = await self.producer.open_sink(transfer, G1, manifest_of(size), deadline_s=60, wait_s=5)
        source = await self.consumer.open_source(ticket_for(self.source.ref, transfer, size), deadline_s=60)
        write(sink, pattern(size)[:filled])
        if seal and filled is None:
            sink.seal()
        return sink, source

    async def arrives(self, size: int = SIZE) -> None:
        _, source = await self.start(size)
        async with asyncio.timeout(30):
            await source.ready()
        assert read(source) == pattern(size)
        source.release()

    async def at_rest(self) -> None:
        await eventually(lambda: self.source.at_rest() and self.target.at_rest(), what="relays at rest")

    def logged(self, event: str) -> list[Any]:
        return [entry for entry in self.log.entries if entry["event"] == event]


@contextlib.asynccontextmanager
async def pair(folder: Path, source: dict[str, Any], target: dict[str, Any], **both: Any) -> AsyncIterator[Pair]:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(running(daemon_settings(folder, "a", **both, **source), log))
        b = await stack.enter_async_context(running(daemon_settings(folder, "b", **both, **target), log))
        producer = await stack.enter_async_context(client_of(a))
        consumer = await stack.enter_async_context(client_of(b))
        yield Pair(a, b, producer, consumer, seen)


async def test_64_chunks_of_1_mib_arrive_byte_for_byte(fabric: Any, tmp_path: Path) -> None:
    big = {"total_slots": 130, "slot_bytes": MIB}
    async with pair(tmp_path, fabric.at(fabric.one), fabric.at(fabric.two), **big) as nodes:
        transfer, data = new_transfer(), [hashlib.shake_128(b"%d" % chunk).digest(MIB) for chunk in range(64)]
        sink = await nodes.producer.open_sink(transfer, G1, manifest_of(64 * MIB), deadline_s=100, wait_s=5)
        source = await nodes.consumer.open_source(ticket_for(nodes.source.ref, transfer, 64 * MIB), deadline_s=100)
        for chunk, part in enumerate(data):
            write(sink, part, chunk * MIB)
        sink.seal()
        async with asyncio.timeout(60):
            await source.ready()
        for chunk, part in enumerate(data):
            assert b"".join(source.map(chunk * MIB, MIB)) == part
        source.release()
        await nodes.at_rest()
        assert nodes.target.daemon.uncredited_chunks == 0


async def test_more_chunks_than_the_queues_hold_go_through_by_credit(fabric: Any, tmp_path: Path) -> None:
    small = {"depths": Depths(send=10, receive=4)}
    ends = fabric.at(fabric.one, **small), fabric.at(fabric.two, **small)
    async with pair(tmp_path, *ends, total_slots=256) as nodes:
        await nodes.arrives(100 * SLOT_BYTES)
        await nodes.at_rest()
        assert nodes.logged("rail.failed") == []


async def test_a_peer_that_does_not_answer_is_retries_exceeded_and_the_lane_comes_back(
    fabric: Any, tmp_path: Path, link: Link
) -> None:
    quick = {"path": IMPATIENT, "first_quarantine_s": 0.1}
    async with pair(tmp_path, fabric.at(fabric.one, **quick), fabric.at(fabric.two, **quick)) as nodes:
        await nodes.arrives()
        link.cut()
        _, source = await nodes.start(seal=False)
        async with asyncio.timeout(20):
            with pytest.raises(PartyLost, match="lane to a peer"):
                await source.ready()
        source.release()
        await nodes.at_rest()
        assert any("RETRY_EXC_ERR" in entry["why"] for entry in nodes.logged("rail.failed"))
        link.mend()
        await nodes.arrives()
        await nodes.at_rest()


async def test_memory_that_is_not_the_peers_to_write_closes_the_lane_with_remote_access_error(
    fabric: Any, tmp_path: Path
) -> None:
    def wrong_pool_key(region: Any, size_bytes: int) -> Any:
        return WrongKey(region) if size_bytes == 64 * SLOT_BYTES else region

    target = fabric.at(fabric.two, load=lambda: Tampered(fabric.load(), region=wrong_pool_key))
    async with pair(tmp_path, fabric.at(fabric.one), target) as nodes:
        _, source = await nodes.start()
        async with asyncio.timeout(20):
            with pytest.raises(IsthmusError) as caught:
                await source.ready()
        assert isinstance(caught.value, TransferFailed | PartyLost)
        source.release()
        await nodes.at_rest()
        refused = [entry for entry in nodes.logged("rail.failed") if "REM_ACCESS_ERR" in entry["why"]]
        assert fabric.one in {entry["device"] for entry in refused}
        assert nodes.source.closed[-1].fault is not None
        assert "REM_ACCESS_ERR" in nodes.source.closed[-1].fault.why


async def test_a_peer_without_receives_is_receiver_not_ready(fabric: Any, tmp_path: Path) -> None:
    target = fabric.at(fabric.two, load=lambda: Tampered(fabric.load(), queue_pair=NeverReady))
    async with pair(tmp_path, fabric.at(fabric.one, path=IMPATIENT), target) as nodes:
        _, source = await nodes.start()
        async with asyncio.timeout(20):
            with pytest.raises(IsthmusError):
                await source.ready()
        source.release()
        await nodes.at_rest()
        assert any("RNR_RETRY_EXC_ERR" in entry["why"] for entry in nodes.logged("rail.failed"))
        fault = nodes.source.closed[-1].fault
        assert fault is not None
        assert (fault.code, "RNR_RETRY_EXC_ERR" in fault.why) == ("transfer_failed", True)


async def test_bytes_that_change_on_the_way_are_a_checksum_mismatch(fabric: Any, tmp_path: Path) -> None:
    source_end = fabric.at(fabric.one, load=lambda: Tampered(fabric.load(), queue_pair=Damaging))
    async with pair(tmp_path, source_end, fabric.at(fabric.two)) as nodes:
        _, source = await nodes.start()
        async with asyncio.timeout(20):
            with pytest.raises(ChecksumMismatch):
                await source.ready()
        source.release()
        await nodes.at_rest()
        assert nodes.target.daemon.stats().failures == {"checksum_mismatch": 1}


async def test_a_bad_rail_is_quarantined_and_tried_again_while_the_other_carries_on(
    fabric: Any, tmp_path: Path, link: Link
) -> None:
    quick = {"path": IMPATIENT, "first_quarantine_s": 0.2, "longest_quarantine_s": 0.2}
    target = fabric.at(fabric.one, fabric.three, **quick)
    source = fabric.at(fabric.two, fabric.four, **quick)
    async with pair(tmp_path, source, target, total_slots=128) as nodes:
        await nodes.arrives()
        await eventually(lambda: len(nodes.logged("rail.up")) == 4, what="both rails up at both ends")
        link.cut()
        for _ in range(3):
            await nodes.arrives(48 * SLOT_BYTES)
        failed = nodes.logged("rail.failed")
        assert {entry["rail"] for entry in failed} == {0}
        assert nodes.logged("lane.down") == []
        link.mend()
        ups = len([entry for entry in nodes.logged("rail.up") if entry["rail"] == 0])
        await eventually(
            lambda: len([entry for entry in nodes.logged("rail.up") if entry["rail"] == 0]) >= ups + 2,
            timeout_s=30,
            what="rail 0 back at both ends",
        )
        await nodes.arrives(48 * SLOT_BYTES)
        await nodes.at_rest()
        assert nodes.target.daemon.stats().received_bytes == SIZE + 4 * 48 * SLOT_BYTES


@contextlib.contextmanager
def peer_process(fabric: Any, folder: Path, size: int, filled: int) -> Any:
    (folder / "peer").mkdir()
    words = [fabric.name, fabric.two, str(folder / "peer"), str(size), str(filled)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "isthmus_testing.rdma_peer_process", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield process, RelayRef.model_validate(told["ref"]), told["transfer"]
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_sender_that_dies_or_falls_silent_fails_its_flows_at_once(
    fabric: Any, tmp_path: Path, how: signal.Signals
) -> None:
    """Nothing arrives in the receiver's queues then: only the control connection tells."""
    liveness = {"liveness": Liveness(ping_interval_s=0.2, ping_timeout_s=1.5)}
    with peer_process(fabric, tmp_path, SIZE, SIZE - SLOT_BYTES) as (process, ref, transfer):
        async with (
            running(daemon_settings(tmp_path, "b", **fabric.at(fabric.one, **liveness))) as b,
            client_of(b) as consumer,
        ):
            source = await consumer.open_source(ticket_for(ref, transfer, SIZE), deadline_s=60)
            await eventually(lambda: b.daemon.stats().received_bytes == SIZE - SLOT_BYTES, timeout_s=30)
            process.send_signal(how)
            async with asyncio.timeout(20):
                with pytest.raises(PartyLost):
                    await source.ready()
            source.release()
            await eventually(b.at_rest)


async def test_a_relay_with_tcp_only_is_reached_over_tcp_when_that_is_allowed(fabric: Any, tmp_path: Path) -> None:
    either = fabric.at(fabric.two) | {"kind": TransportKind.AUTO}
    async with pair(tmp_path, {}, either) as nodes:
        await nodes.arrives()
        await nodes.at_rest()
        (refused,) = nodes.logged("lane.dial_failed")
        assert refused["code"] == "no_capacity"
    async with pair(tmp_path, either, {}) as nodes:
        await nodes.arrives()
    async with pair(tmp_path, {}, fabric.at(fabric.two)) as nodes:
        _, source = await nodes.start()
        with pytest.raises(IsthmusError, match="no lanes over verbs"):
            await source.ready()
        source.release()


def test_it_runs_on_the_services_event_loop_too(fabric: Any, tmp_path: Path) -> None:
    async def one() -> None:
        async with pair(tmp_path, fabric.at(fabric.one), fabric.at(fabric.two)) as nodes:
            await nodes.arrives()
            await nodes.at_rest()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(one())


async def test_a_device_that_does_not_exist_stops_the_relay_with_a_reason(fabric: Any, tmp_path: Path) -> None:
    settings = daemon_settings(tmp_path, "a", **fabric.at("nonesuch"))
    with pytest.raises(ConfigInvalid, match="nonesuch"):
        async with running(settings):
            pass


async def test_nothing_is_left_open_when_a_relay_stops(fabric: Any, tmp_path: Path) -> None:
    async def once(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        async with pair(folder, fabric.at(fabric.one), fabric.at(fabric.two)) as nodes:
            await nodes.arrives()

    await once("first")
    before = len(os.listdir("/proc/self/fd"))
    await once("second")
    assert len(os.listdir("/proc/self/fd")) <= before
