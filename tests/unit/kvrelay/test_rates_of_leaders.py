"""A relay works below the ceilings of the planner that leads, and of no earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus_kvrelay.core.events import Event, RatesSet
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.service import RelayService
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.health import LaneRate, RelayRates
from isthmus_shared.service import ServiceRuntime


class Daemon:
    """Keeps what it is told."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.told: list[Event] = []

    def take(self, event: Event) -> None:
        self.told.append(event)


def rates(epoch: int, sender: Incarnation, bytes_per_s: float) -> RelayRates:
    lane = LaneRate(sender=sender, receiver=Incarnation("there"), bytes_per_s=bytes_per_s)
    return RelayRates(lanes=(lane,), epoch=epoch, valid_s=10.0)


async def test_an_older_leaders_ceilings_are_ignored_and_an_operators_are_not(tmp_path: Path) -> None:
    config = RelayConfig(node_id=NodeId("n"), socket=tmp_path / "s", secret="x" * 32)
    bus = MemoryBroker().client("relay")
    runtime = ServiceRuntime("kvrelay", config, bus=bus, instance="n", serve_http=False)
    service = RelayService(runtime, make_daemon=Daemon)
    daemon: Any = service.daemon
    me = runtime.incarnation
    for epoch, ceiling in ((5, 1e9), (4, 2e9), (5, 3e9), (0, 4e9), (3, 5e9), (6, 6e9)):
        await service.take_rates(rates(epoch, me, ceiling))
    assert [told.by_peer[0][1] for told in daemon.told if isinstance(told, RatesSet)] == [1e9, 3e9, 4e9, 6e9]
    await service.take_rates(rates(7, Incarnation("another"), 7e9))
    assert daemon.told[-1].by_peer == ()
