"""The relay as a process on the bus: heartbeats, the news of lost workers, metrics, a bounded end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import process_time

from isthmus_kvrelay.core.events import RatesSet
from isthmus_kvrelay.core.staging import SlotState
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.observed import HostCost, Observed
from isthmus_kvrelay.daemon.relay_daemon import RelayDaemon
from isthmus_shared.errors import BusDisconnected, PayloadTooLarge
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, RelayHeartbeat, RelayRates, WorkerLost
from isthmus_shared.messages.work import WorkerRef
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
    def __init__(
        self,
        runtime: ServiceRuntime[RelayConfig],
        *,
        make_daemon: Callable[..., RelayDaemon] = RelayDaemon,
        cpu_s: Callable[[], float] = process_time,
    ) -> None:
        self._runtime, self._cpu_s = runtime, cpu_s
        self._losses: deque[WorkerLost] = deque(maxlen=MAX_LOSSES)
        self._news = asyncio.Event()
        self._observed = Observed(runtime.metrics)
        self._host_cost = HostCost()
        self._epoch = 0
        """The highest of a leading planner that has set rates."""
        self.daemon = make_daemon(
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
                    tasks.create_task(runtime.watch(subjects.RELAY_RATES, RelayRates, self.take_rates), name="rates"),
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
            pool_free_bytes=stats.slots_usable * stats.slot_bytes,
            flows_out=stats.flows_out,
            flows_in=stats.flows_in,
            credits_outstanding_bytes=stats.credits_outstanding_bytes,
            slots_quarantined=stats.slots[SlotState.QUARANTINED],
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
            host_s_per_byte=self._host_s_per_byte(stats.slot_bytes),
            clients=self.daemon.clients(),
        )

    def _host_s_per_byte(self, slot_bytes: int) -> float | None:
        us = self._host_cost.us_per_chunk
        return us * 1e-6 / slot_bytes if us else None

    async def take_rates(self, rates: RelayRates) -> None:
        if 0 < rates.epoch < self._epoch:
            self._runtime.log.warning("rates.stale", epoch=rates.epoch, seen=self._epoch)
            return
        self._epoch = max(self._epoch, rates.epoch)
        me = self._runtime.incarnation
        mine = tuple((lane.receiver, lane.bytes_per_s) for lane in rates.lanes if lane.sender == me)
        self.daemon.take(RatesSet(rates.default_bytes_per_s, mine, rates.valid_s))

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
                except (
                    PayloadTooLarge
                ):  # the bus is back with a lower limit; heartbeats without the worker say the same
                    self._losses.popleft()
                else:
                    self._losses.popleft()

    async def _say_goodbye(self) -> None:
        """What is still unsaid, if the bus is there."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._losses:
                    await self._runtime.bus.publish(subjects.WORKER_LOST, self._losses.popleft().encode())
                await self._runtime.bus.publish(subjects.HEARTBEAT_RELAY, self.heartbeat().encode())
        except (BusDisconnected, PayloadTooLarge, TimeoutError):
            self._runtime.log.warning("relay.left_unsaid", losses=len(self._losses))

    async def _observe(self) -> None:
        while True:
            stats = self.daemon.stats()
            self._observed.take(stats, self.daemon.uncredited_chunks, self.daemon.take_chunk_times())
            cost = self._host_cost.measure(self._cpu_s(), stats.credits["staging_slots"].consumed)
            if cost is not None:
                self.daemon.take(cost)
            await asyncio.sleep(self._runtime.config.heartbeat_interval_s)


async def serve(runtime: ServiceRuntime[RelayConfig]) -> None:
    await RelayService(runtime).run()
