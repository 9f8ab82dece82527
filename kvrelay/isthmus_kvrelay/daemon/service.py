"""The relay as a process on the bus: heartbeats, the news of lost workers, metrics, a bounded end."""

from __future__ import annotations

import asyncio
from collections import deque

from isthmus_kvrelay.core.events import FlowClosed, Side
from isthmus_kvrelay.core.relay import RelayStats
from isthmus_kvrelay.core.staging import SlotState
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.relay_daemon import RelayDaemon
from isthmus_shared.errors import BusDisconnected, ChecksumMismatch
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, RelayHeartbeat, WorkerLost
from isthmus_shared.messages.work import WorkerRef
from isthmus_shared.metrics import Metrics
from isthmus_shared.service import ServiceRuntime

MAX_LOSSES = 1_024
"""Lost workers that wait for the bus; beyond it the oldest goes (a heartbeat without the worker says the same)."""
DRAIN_SHARE = 0.8
"""Of the shutdown grace: for flows to finish. The rest is for closing."""
OTHERS_BACK_S = 1.0
"""After an outage of the bus, before the news is told: whom it concerns must have reconnected too (they dial ten times
a second), since the bus keeps nothing for the absent."""
FAREWELL_S = 1.0
"""For what is still unsaid on the bus when the process ends."""


class RelayService:
    def __init__(self, runtime: ServiceRuntime[RelayConfig]) -> None:
        self._runtime = runtime
        self._losses: deque[WorkerLost] = deque(maxlen=MAX_LOSSES)
        self._news = asyncio.Event()
        self._observed = Observed(runtime.metrics)
        self.daemon = RelayDaemon(
            runtime.config.settings(runtime.incarnation),
            log=runtime.log,
            on_client_lost=self._client_lost,
            on_flow_closed=self._observed.flow_closed,
        )

    async def run(self) -> None:
        """Until `stopping`; then flows get a bounded time to finish."""
        runtime = self._runtime
        await self.daemon.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(runtime.heartbeat(subjects.HEARTBEAT_RELAY, self.heartbeat), name="heartbeat"),
                    tasks.create_task(self._tell_losses(), name="losses"),
                    tasks.create_task(self._observe(), name="observe"),
                    tasks.create_task(self.daemon.watch(), name="transport"),
                ]
                runtime.set_state(ProcessState.READY)
                await runtime.stopping.wait()
                await self.daemon.drain(runtime.config.shutdown_grace_s * DRAIN_SHARE)
                await self._say_goodbye()
                for task in loops:
                    task.cancel()
        finally:
            await self.daemon.stop()

    def heartbeat(self) -> RelayHeartbeat:
        stats = self.daemon.stats()
        return RelayHeartbeat(
            incarnation=self._runtime.incarnation,
            state=self._runtime.state,
            interval_s=self._runtime.config.heartbeat_interval_s,
            http_address=self._runtime.http_address,
            relay=self.daemon.ref,
            pool_bytes=stats.slots_total * stats.slot_bytes,
            pool_free_bytes=stats.slots[SlotState.FREE] * stats.slot_bytes,
            flows_out=stats.flows_out,
            flows_in=stats.flows_in,
            credits_outstanding_bytes=stats.credits_outstanding_bytes,
            slots_quarantined=stats.slots[SlotState.QUARANTINED],
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
            clients=self.daemon.clients(),
        )

    def _client_lost(self, worker: WorkerRef, why: str) -> None:
        self._losses.append(WorkerLost(worker=worker, why=why))
        self._news.set()

    async def _tell_losses(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._losses:
                try:
                    await self._runtime.bus.publish(subjects.WORKER_LOST, self._losses[0].encode())
                except BusDisconnected:
                    await self._runtime.bus.wait_connected()
                    await asyncio.sleep(OTHERS_BACK_S)
                else:
                    self._losses.popleft()

    async def _say_goodbye(self) -> None:
        """What is still unsaid, if the bus is there."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._losses:
                    await self._runtime.bus.publish(subjects.WORKER_LOST, self._losses.popleft().encode())
                await self._runtime.bus.publish(subjects.HEARTBEAT_RELAY, self.heartbeat().encode())
        except (BusDisconnected, TimeoutError):
            self._runtime.log.warning("relay.left_unsaid", losses=len(self._losses))

    async def _observe(self) -> None:
        while True:
            self._observed.take(self.daemon.stats(), self.daemon.uncredited_chunks)
            await asyncio.sleep(self._runtime.config.heartbeat_interval_s)


class Observed:
    """The core's sums and states as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sent_bytes = self._received_bytes = self._stale = self._uncredited = 0
        self._granted_bytes = self._quarantines = 0

    def take(self, stats: RelayStats, uncredited_chunks: int) -> None:
        m = self._metrics
        m.relay_pool_bytes.set(stats.slots_total * stats.slot_bytes)
        m.relay_pool_free_bytes.set(stats.slots[SlotState.FREE] * stats.slot_bytes)
        m.relay_slots_quarantined.set(stats.slots[SlotState.QUARANTINED])
        m.relay_flows.labels(Side.OUT.value).set(stats.flows_out)
        m.relay_flows.labels(Side.IN.value).set(stats.flows_in)
        m.relay_credits_outstanding_bytes.set(stats.credits_outstanding_bytes)
        m.relay_lanes.labels("up").set(stats.lanes)
        m.relay_clients.set(stats.clients)
        m.relay_sent_bytes.labels("tcp").inc(stats.sent_bytes - self._sent_bytes)
        m.relay_received_bytes.labels("tcp").inc(stats.received_bytes - self._received_bytes)
        m.relay_credits_granted_bytes.inc(stats.credits_granted_bytes - self._granted_bytes)
        m.relay_quarantines.inc(stats.quarantines - self._quarantines)
        m.relay_stale.labels("message").inc(stats.stale - self._stale)
        m.relay_stale.labels("chunk").inc(uncredited_chunks - self._uncredited)
        self._sent_bytes, self._received_bytes = stats.sent_bytes, stats.received_bytes
        self._granted_bytes, self._quarantines = stats.credits_granted_bytes, stats.quarantines
        self._stale, self._uncredited = stats.stale, uncredited_chunks

    def flow_closed(self, closed: FlowClosed) -> None:
        cause = "done" if closed.fault is None else closed.fault.code
        self._metrics.relay_flows_ended.labels(closed.side.value, cause).inc()
        if closed.side is Side.IN and cause == ChecksumMismatch.code:
            self._metrics.relay_checksum_failures.inc()


async def serve(runtime: ServiceRuntime[RelayConfig]) -> None:
    await RelayService(runtime).run()
