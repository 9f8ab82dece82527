"""Many flows among many relays under a seeded schedule of faults: the cores of `relay_world` with a driver over them.

    python -m isthmus_testing.relay_storm --seeds 2000 --flows 60

One seed is one run: nodes with clients, flows offered and asked for, chunks and messages that make their way in any
order the transports allow (chunks overtake, come twice, come damaged, come late), consumers that release slowly or die,
producers that die, lanes that are cut, relays that restart, destinations that take a flow over from another. At the end
everything must come to rest with nothing held, and every flow that nothing was done to must have been delivered.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import FlowKey, SlotUse
from isthmus_testing.relay_world import SLOT_BYTES, Client, Node, Wire, World, flow

MAX_CHUNKS = 6
CHECK_EVERY = 64
"""Events of a run between two full checks of a core's invariants: they cost a hundred events."""
CLIENTS = 2
SAME_NODE_SHARE = 0.2
"""Of the flows: both ends are clients of one relay."""
CRASH_SHARE = 0.05
"""Of the rounds: something goes wrong."""
IDLE_STEP = 8
IDLE_END = 5 * IDLE_STEP
"""Rounds in which chance found nothing to do: time passes after some of them, the run ends after some times that."""
MAX_LEAP_S = 1_000.0
"""Deadlines of runs without faults are further away: they must not be what ends a flow."""


@dataclass(frozen=True, slots=True)
class StormSize:
    nodes: int = 16
    flows: int = 60
    total_slots: int = 48
    at_once: bool = False
    """All flows are offered at the start."""
    calm: bool = False
    """Nothing goes wrong: then every flow must arrive."""


@dataclass(slots=True)
class StormReport:
    seed: int
    events: int = 0
    deaths: int = 0
    delivered: int = 0
    retargets: int = 0
    revivals: int = 0
    stale: int = 0
    peak_flows: int = 0


class StormWorld(World):
    """A world that checks what a change can have broken, rather than everything after each change."""

    def __init__(self, seed: int, size: StormSize) -> None:
        names = [f"n{number}" for number in range(size.nodes)]
        self.random = Random(seed)
        super().__init__(
            names,
            total_slots=size.total_slots,
            rate_bytes_per_s=self.random.choice([float("inf"), 400.0]),
            work_requests=self.random.choice([None, 2, 8]),
            host_us_per_step=self.random.choice([0.0, 2_000.0]),
            client_share=self.random.choice([1.0, 0.5]),
            retain_bytes=self.random.choice([None, 0]),
        )
        self.events = 0

    def tell(self, node: Node, event: ev.Event) -> None:
        self.events += 1
        self.tell_only(node, event)
        if self.events % CHECK_EVERY == 0:
            node.core.check_invariants()

    def check_all_reading(self) -> None:
        """Writes are checked one by one (`_write`)."""

    def write(self, node: Node, slot: int, content: object) -> None:
        for client in node.clients.values():
            for key, source in client.sources.items():
                if source.slots is not None and slot in source.slots:
                    wanted = (key, source.slots.index(slot))
                    assert content == wanted, f"{key} reads {content} where {wanted} was meant"
        super().write(node, slot, content)


class Storm:
    def __init__(self, seed: int, size: StormSize) -> None:
        self.world = StormWorld(seed, size)
        self.random = self.world.random
        self.size = size
        self.report = StormReport(seed)
        self.untold = [flow(f"f{number}", 1) for number in range(size.flows)]
        self.pulls: dict[FlowKey, int] = {}
        self.offered: list[FlowKey] = []
        self.filling: list[tuple[Node, Client, FlowKey]] = []
        for node in self.world.nodes.values():
            for _ in range(CLIENTS):
                self.world.join(node)

    def run(self) -> StormReport:
        world = self.world
        self._offer(len(self.untold) // (1 if self.size.at_once else 2))
        idle = 0
        while idle < IDLE_END:
            self._offer(self.random.randrange(3))
            moved = self._move()
            if not self.size.calm and self.random.random() < CRASH_SHARE:
                self._strike()
            idle = 0 if moved or self.untold else idle + 1
            if idle % IDLE_STEP == IDLE_STEP - 1:
                self._let_time_pass()
        if self.size.calm:
            self._finish()
        self._count()
        if self.size.calm:
            arrived = {key for node in world.nodes.values() for key, _ in node.delivered}
            assert arrived == set(self.offered), f"{len(self.offered) - len(arrived)} flows never arrived"
        world.settle()
        return self.report

    # --- what engines do

    def _offer(self, flows: int) -> None:
        for _ in range(min(flows, len(self.untold))):
            key = self.untold.pop()
            nodes = list(self.world.nodes.values())
            home = self.random.choice(nodes)
            there = home if self.random.random() < SAME_NODE_SHARE else self.random.choice(nodes)
            producer = self._client(home)
            size = self.random.randint(1, MAX_CHUNKS * SLOT_BYTES)
            self.world.open_sink(home, producer, key, size, self._deadline_s())
            self.offered.append(key)
            self.filling.append((home, producer, key))
            self._ask(there, key)
        self.report.peak_flows = max(self.report.peak_flows, len(self.filling))

    def _ask(self, node: Node, key: FlowKey) -> None:
        client = self._client(node)
        if key in client.sources:
            return
        self.pulls[key] = self.pulls.get(key, 0) + 1
        tokens = self.random.choice([0, 3])
        self.world.open_source(node, client, key, self._deadline_s(), pull=self.pulls[key], kv_tokens=tokens)

    def _deadline_s(self) -> float:
        return 1e9 if self.size.calm else self.random.choice([30.0, 1e4])

    def _client(self, node: Node) -> Client:
        while len(node.clients) < CLIENTS:
            self.world.join(node)
        return self.random.choice(list(node.clients.values()))

    def _fill(self) -> bool:
        for _ in range(min(8, len(self.filling))):
            index = self.random.randrange(len(self.filling))
            node, client, key = self.filling[index]
            sink = client.sinks.get(key)
            if sink is not None and not sink.opened and not sink.ended:
                continue  # waits for its slots
            if not self._fill_one(node, client, key):
                self.filling[index] = self.filling[-1]
                self.filling.pop()
            return True
        return False

    def _fill_one(self, node: Node, client: Client, key: FlowKey) -> bool:
        """False: there is nothing more to do for that sink."""
        sink = client.sinks.get(key)
        if sink is None or node.clients.get(client.number) is not client:
            return False
        if sink.ended:
            self.world.notice_end(node, client, key)
            return False
        left = [chunk for chunk in range(len(sink.slots)) if chunk not in sink.filled]
        if left:
            self.world.fill(node, client, key, self.random.choice(left))
            return True
        self.world.seal(node, client, key)
        return False

    def _release(self) -> bool:
        """A consumer reads, slowly: one of those that can."""
        node = self._some_node()
        for client in node.clients.values():
            for key, source in client.sources.items():
                if source.failed is not None or source.slots is not None:
                    failed = source.failed
                    self.world.release(node, client, key)
                    self._maybe_retarget(key, failed is None)
                    return True
        return False

    def _maybe_retarget(self, key: FlowKey, delivered: bool) -> None:
        """Now and then another destination wants it, be it because the first one failed."""
        if self.pulls[key] < 4 and self.random.random() < (0.1 if delivered else 0.5):
            home = self.world.homes[key][1]
            if self.world.nodes[home].incarnation == self.world.homes[key][0]:
                self._ask(self._some_node(), key)

    # --- what moves

    def _move(self) -> bool:
        moved = False
        for _ in range(16):
            moved = self._move_once(self.random.randrange(6)) or moved
        return moved

    def _move_once(self, what: int) -> bool:
        world = self.world
        if (world.pending or world.to_cut) and self.random.random() < 0.7:
            world.tell_pending()
            return True
        match what:
            case 0:
                return self._fill()
            case 1:
                return self._release()
            case 2:
                return self._dial() or self._end_receive()
            case _:
                return self._on_a_wire()

    def _dial(self) -> bool:
        node = self._some_node()
        if not node.dials:
            return False
        self.world.answer_dial(node, ok=self.size.calm or self.random.random() > 0.02)
        return True

    def _end_receive(self) -> bool:
        node = self._some_node()
        if not node.claimed:
            return False
        ref: SlotUse = self.random.choice(list(node.claimed))
        damaged = not self.size.calm and self.random.random() < 0.01
        self.world.end_receive(node, ref, damaged=damaged, repeat=self.random.random() < 0.1)
        return True

    def _on_a_wire(self) -> bool:
        if not self.world.wires:
            return False
        for _ in range(4):
            wire = self.random.choice(self.world.wires)
            if self._advance(wire, self.random.randrange(2)):
                return True
        return False

    def _advance(self, wire: Wire, side: int) -> bool:
        world, random = self.world, self.random
        if not wire.alive:
            world.join_threads(wire)
            return True
        if wire.control[side] and random.random() < 0.6:
            world.deliver_control(wire, side)
        elif wire.unsent[side]:
            world.send(wire, side, random.randrange(len(wire.unsent[side])))
        elif wire.flying[side]:
            index = random.randrange(len(wire.flying[side]))
            world.begin_receive(wire, side, index, keep_copy=random.random() < 0.1)
        elif wire.control[side]:
            world.deliver_control(wire, side)
        else:
            return False
        return True

    # --- what goes wrong

    def _strike(self) -> None:
        self.report.deaths += 1
        world, node = self.world, self._some_node()
        match self.random.randrange(8):
            case 0:
                self._count_node(node)
                world.restart(node)
            case 1 | 2:
                if node.clients:
                    world.leave(node, self.random.choice(list(node.clients.values())))
            case 3 | 4:
                alive = [wire for wire in world.wires if wire.alive]
                if alive:
                    world.cut(self.random.choice(alive))
            case 5 if self.offered:
                world.abort(node, self._client(node), self.random.choice(self.offered))
            case 6 if self.offered:
                self._maybe_retarget(self.random.choice(self.offered), delivered=False)
            case _:
                self._report_step(node)

    def _report_step(self, node: Node) -> None:
        client = self._client(node)
        free = self.random.choice([0, 4, 100])
        self.world.tell(node, ev.StepReported(client.number, 0.05, free, 2))
        self.world.tell(node, ev.ItlReported(client.number, self.random.choice([0.01, 0.3]), 0.05))

    def _let_time_pass(self) -> None:
        due = [at_s for node in self.world.nodes.values() if (at_s := node.core.next_deadline_s()) is not None]
        by_s = max(0.0, min(due, default=self.world.now_s) - self.world.now_s)
        if by_s < MAX_LEAP_S:
            self.world.advance(by_s + 1e-6)

    def _finish(self) -> None:
        """What chance has not picked yet: everything moves until only far deadlines are left."""
        before_s = -1.0
        while before_s != self.world.now_s:
            before_s = self.world.now_s
            while self.world.settle_step():
                pass
            self._let_time_pass()

    def _some_node(self) -> Node:
        return self.random.choice(list(self.world.nodes.values()))

    # --- the end

    def _count(self) -> None:
        self.report.events = self.world.events
        for node in self.world.nodes.values():
            self._count_node(node)

    def _count_node(self, node: Node) -> None:
        stats = node.core.stats()
        self.report.delivered += stats.delivered_in
        self.report.retargets += stats.retargets
        self.report.revivals += stats.revivals
        self.report.stale += stats.stale


def run_storm(seed: int, size: StormSize) -> StormReport:
    """One run; an `AssertionError` names the seed."""
    try:
        return Storm(seed, size).run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {size}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulated relays under faults, one run per seed.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--flows", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--slots", type=int, default=48, help="of each relay's pool")
    parser.add_argument("--at-once", action="store_true", help="all flows are offered at the start")
    parser.add_argument("--calm", action="store_true", help="nothing goes wrong, and every flow must arrive")
    args = parser.parse_args(argv)
    size = StormSize(nodes=args.nodes, flows=args.flows, total_slots=args.slots, calm=args.calm, at_once=args.at_once)
    began_s, total = time.monotonic(), StormReport(0)
    for seed in range(args.first, args.first + args.seeds):
        report = run_storm(seed, size)
        total.events += report.events
        total.deaths += report.deaths
        total.delivered += report.delivered
        total.retargets += report.retargets
        total.revivals += report.revivals
        total.stale += report.stale
        total.peak_flows = max(total.peak_flows, report.peak_flows)
    took_s = time.monotonic() - began_s
    sys.stdout.write(
        f"seeds={args.seeds} nodes={size.nodes} flows={args.seeds * size.flows} events={total.events} "
        f"faults={total.deaths} delivered={total.delivered} retargets={total.retargets} revivals={total.revivals} "
        f"stale_refused={total.stale} took_s={took_s:.1f}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
