"""What a relay's metrics say of its core's sums."""

from __future__ import annotations

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, LaneId
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_kvrelay.daemon.observed import Observed
from isthmus_shared.errors import PartyLost
from isthmus_shared.ids import Incarnation
from isthmus_shared.metrics import Metrics
from isthmus_testing.relay_world import SLOT_BYTES, flow

ME = ClientId(1)


def receive(core: RelayCore, lane: LaneId, peer: str) -> None:
    key = flow(f"from-{peer}-{lane}", 1)
    core.handle(ev.OpenSource(ME, key, Incarnation(peer), peer, SLOT_BYTES, "m", 10), now_s=0.0)
    told = core.handle(ev.OpenedReceived(lane, key, 1, SLOT_BYTES, SLOT_BYTES, "m"), now_s=0.0)
    (credit,) = [effect for effect in told if isinstance(effect, ev.SendCredit)]
    core.handle(ev.ChunkLanded(lane, key, 0, credit.grants[0].into, intact=True), now_s=0.0)


def send(core: RelayCore, lane: LaneId) -> None:
    key = flow("out", 1)
    core.handle(ev.OpenSink(ME, key, SLOT_BYTES, "m", 10, 5), now_s=0.0)
    core.handle(ev.ChunksFilled(ME, key, (0,)), now_s=0.0)
    core.handle(ev.PullReceived(lane, key, 1), now_s=0.0)
    told = core.handle(ev.CreditReceived(lane, key, 1, (ev.Grant(0, ev.SlotUse(0, 1)),)), now_s=0.0)
    (job,) = [effect for effect in told if isinstance(effect, ev.SendChunk)]
    core.handle(ev.ChunkSent(lane, key, 0, job.out_of, ok=True), now_s=0.0)


def said(metrics: Metrics, way: str, transport: str) -> float | None:
    wanted = f'isthmus_relay_{way}_bytes_total{{transport="{transport}"}} '
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith(wanted)]
    return float(lines[0].removeprefix(wanted)) if lines else None


def test_bytes_are_counted_by_what_carried_them_also_when_the_lane_is_gone() -> None:
    core = RelayCore(RelaySettings(incarnation=Incarnation("a"), slot_bytes=SLOT_BYTES, total_slots=16, out_share=0.5))
    metrics = Metrics()
    observed = Observed(metrics)
    core.handle(ev.ClientUp(ME), now_s=0.0)
    core.handle(ev.LaneUp(LaneId(1), Incarnation("b")), now_s=0.0)
    core.handle(ev.LaneUp(LaneId(2), Incarnation("c"), via="verbs", depth=64), now_s=0.0)
    receive(core, LaneId(1), "b")
    receive(core, LaneId(2), "c")
    send(core, LaneId(2))
    core.handle(ev.LaneDown(LaneId(2), PartyLost("gone").to_fault()), now_s=0.0)
    for _ in range(2):  # counts are of what is new
        observed.take(core.stats(), 0, core.take_chunk_times())
    assert (said(metrics, "received", "tcp"), said(metrics, "received", "verbs")) == (SLOT_BYTES, SLOT_BYTES)
    assert (said(metrics, "sent", "tcp"), said(metrics, "sent", "verbs")) == (None, SLOT_BYTES)
