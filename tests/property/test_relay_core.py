"""Any schedule of engines, lanes, faults and restarts: nothing leaks, nothing comes twice or to the wrong one."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import FlowKey
from isthmus_kvrelay.core.relay import PACER_BURST_CHUNKS
from isthmus_testing.relay_world import SLOT_BYTES, Client, Node, Wire, World, flow

CHUNKS = 3  # of the largest flow; the pool has four slots for each direction


class RelayMachine(RuleBasedStateMachine):
    @initialize(
        names=st.sampled_from(["ab", "abc"]),
        rate=st.sampled_from([float("inf"), 25.0]),
        retain=st.integers(0, 4),
        work=st.sampled_from([None, 1, 2, 3]),
        host=st.sampled_from([0.0, 200.0]),
    )
    def begin(self, names: str, rate: float, retain: int, work: int | None, host: float) -> None:
        self.rate = rate
        self.world = World(
            names,
            total_slots=8,
            rate_bytes_per_s=rate,
            retain_bytes=retain * SLOT_BYTES,
            work_requests=work,
            host_us_per_step=host,
        )
        self.offered: list[FlowKey] = []

    # --- who there is to act

    def some_node(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(list(self.world.nodes.values())))

    def some_client(self, data: st.DataObject) -> tuple[Node, Client]:
        node = self.some_node(data)
        if not node.clients or (len(node.clients) < 2 and data.draw(st.booleans())):
            return node, self.world.join(node)
        return node, data.draw(st.sampled_from(list(node.clients.values())))

    def wires(self, *, alive: bool) -> list[Wire]:
        return [wire for wire in self.world.wires if wire.alive is alive]

    def rarely(self, data: st.DataObject) -> bool:
        return data.draw(st.integers(0, 4)) == 3

    # --- engines

    @rule(data=st.data(), transfer=st.sampled_from("tuv"), chunks=st.integers(1, CHUNKS), short=st.booleans())
    def open_sink(self, data: st.DataObject, transfer: str, chunks: int, short: bool) -> None:
        node, client = self.some_client(data)
        known = [key.generation for key in self.offered if key.transfer_id == transfer]
        key = flow(transfer, max(known, default=0) + 1)
        self.offered.append(key)
        size = chunks * SLOT_BYTES - (3 if short else 0)
        self.world.open_sink(node, client, key, size, data.draw(st.sampled_from([5.0, 1e5])))

    @rule(data=st.data(), chunks=st.integers(1, CHUNKS))
    def offer_and_ask(self, data: st.DataObject, chunks: int) -> None:
        """A transfer as it should be: one client offers it, another asks for it at once."""
        self.open_sink(data, f"x{len(self.offered)}", chunks, False)
        node, client = self.some_client(data)
        self.world.open_source(node, client, self.offered[-1], data.draw(st.sampled_from([5.0, 1e5])))

    @rule(data=st.data(), chunks=st.integers(1, 3))
    def fill(self, data: st.DataObject, chunks: int) -> None:
        for _ in range(chunks):
            self.fill_one(data)

    def fill_one(self, data: st.DataObject) -> None:
        ready = [
            (node, client)
            for node in self.world.nodes.values()
            for client in node.clients.values()
            if any(len(sink.filled) < len(sink.slots) for sink in client.sinks.values())
        ]
        if not ready:
            return
        node, client = data.draw(st.sampled_from(ready))
        left = [
            (key, chunk)
            for key, sink in client.sinks.items()
            for chunk in range(len(sink.slots))
            if chunk not in sink.filled
        ]
        self.world.fill(node, client, *data.draw(st.sampled_from(left)))

    @rule(data=st.data())
    def seal_or_notice(self, data: st.DataObject) -> None:
        everyone = [(n, client) for n in self.world.nodes.values() for client in n.clients.values() if client.sinks]
        if not everyone:
            return
        node, client = data.draw(st.sampled_from(everyone))
        for key, sink in list(client.sinks.items()):
            if sink.ended:
                self.world.notice_end(node, client, key)
                return
            if sink.opened and len(sink.filled) == len(sink.slots):
                self.world.seal(node, client, key)
                return

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def open_source(self, data: st.DataObject) -> None:
        node, client = self.some_client(data)
        key = data.draw(st.sampled_from(self.offered[-4:]))
        if key not in client.sources:
            deadline_s, pull = data.draw(st.sampled_from([5.0, 1e5])), data.draw(st.integers(1, 4))
            self.world.open_source(node, client, key, deadline_s, pull=pull, kv_tokens=data.draw(st.integers(0, 3)))

    @rule(data=st.data(), free=st.integers(0, 4), itl_s=st.sampled_from([0.01, 0.2]))
    def step(self, data: st.DataObject, free: int, itl_s: float) -> None:
        node, client = self.some_client(data)
        self.world.tell(node, ev.StepReported(client.number, 0.1, free, 2))
        self.world.tell(node, ev.ItlReported(client.number, itl_s, 0.1))

    @rule(data=st.data(), rate=st.sampled_from([None, 15.0]))
    def planner_sets_rates(self, data: st.DataObject, rate: float | None) -> None:
        self.world.tell(self.some_node(data), ev.RatesSet(rate, (), 3.0))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Mostly of what is over or has arrived; now and then a consumer gives up."""
        gives_up = data.draw(st.sampled_from([False] * 4 + [True]))
        found = [
            (node, client, key)
            for node in self.world.nodes.values()
            for client in node.clients.values()
            for key, source in client.sources.items()
            if gives_up or source.failed is not None or source.slots is not None
        ]
        if found:
            self.world.release(*data.draw(st.sampled_from(found)))

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.rarely(data):
            return
        node, client = self.some_client(data)
        self.world.abort(node, client, data.draw(st.sampled_from(self.offered[-4:])))

    @rule(data=st.data())
    def client_dies(self, data: st.DataObject) -> None:
        if not self.rarely(data):
            return
        node = self.some_node(data)
        if node.clients:
            self.world.leave(node, data.draw(st.sampled_from(list(node.clients.values()))))

    # --- lanes

    @precondition(lambda self: any(node.dials for node in self.world.nodes.values()))
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def answer_dial(self, data: st.DataObject, ok: bool) -> None:
        dialing = [node for node in self.world.nodes.values() if node.dials]
        self.world.answer_dial(data.draw(st.sampled_from(dialing)), ok=ok)

    @precondition(lambda self: self.wires(alive=True))
    @rule(data=st.data(), steps=st.integers(1, 10))
    def move(self, data: st.DataObject, steps: int) -> None:
        """Messages and chunks make their way; chunks overtake each other and the messages."""
        for _ in range(steps):
            self.move_once(data, data.draw(st.sampled_from(self.wires(alive=True))), data.draw(st.sampled_from([0, 1])))

    def move_once(self, data: st.DataObject, wire: Wire, side: int) -> None:
        world = self.world
        if wire.control[side] and data.draw(st.booleans()):
            world.deliver_control(wire, side)
        elif wire.unsent[side]:
            world.send(wire, side, data.draw(st.integers(0, len(wire.unsent[side]) - 1)))
        elif wire.flying[side]:
            index = data.draw(st.integers(0, len(wire.flying[side]) - 1))
            world.begin_receive(wire, side, index, keep_copy=data.draw(st.booleans()))
        elif wire.control[side]:
            world.deliver_control(wire, side)

    @rule(data=st.data(), damaged=st.sampled_from([False] * 7 + [True]), repeat=st.booleans())
    def end_receive(self, data: st.DataObject, damaged: bool, repeat: bool) -> None:
        node = self.some_node(data)
        if node.claimed:
            self.world.end_receive(node, data.draw(st.sampled_from(list(node.claimed))), damaged=damaged, repeat=repeat)

    @precondition(lambda self: self.wires(alive=True))
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        if not self.rarely(data):
            return
        self.world.cut(data.draw(st.sampled_from(self.wires(alive=True))))

    @precondition(lambda self: self.wires(alive=False))
    @rule()
    def join_threads(self) -> None:
        self.world.join_threads(self.wires(alive=False)[0])

    @rule()
    def tell_pending(self) -> None:
        self.world.tell_pending()

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        if not self.rarely(data):
            return
        self.world.restart(self.some_node(data))

    @rule(by_s=st.sampled_from([0.05, 0.5, 0.5, 6.0]))
    def time_passes(self, by_s: float) -> None:
        self.world.advance(by_s)

    # --- what holds

    @invariant()
    def consumers_read_what_was_meant_for_them(self) -> None:
        if hasattr(self, "world"):
            self.world.check_all_reading()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.settle()
        if self.rate != float("inf"):
            check_pace(self.world, self.rate)


def check_pace(world: World, rate: float) -> None:
    """No lane ever sent more in any window than its rate and burst allow."""
    lanes: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for at_s, node, lane, size in world.sent:
        lanes.setdefault((node, lane), []).append((at_s, size))
    for sends in lanes.values():
        for first in range(len(sends)):
            total = 0
            for at_s, size in sends[first:]:
                total += size
                assert total <= rate * (at_s - sends[first][0]) + PACER_BURST_CHUNKS * SLOT_BYTES + 1


TestRelayCore = RelayMachine.TestCase
TestRelayCore.settings = settings(
    max_examples=100, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(
    rate=st.floats(5, 1000),
    flows=st.lists(st.integers(1, 5 * SLOT_BYTES), min_size=3, max_size=8),
    pauses_s=st.lists(st.floats(0, 2), max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_a_paced_lane_uses_its_rate_and_never_exceeds_it(rate: float, flows: list[int], pauses_s: list[float]) -> None:
    world = World("ab", total_slots=128, rate_bytes_per_s=rate)
    a, b = world.nodes["a"], world.nodes["b"]
    producer, consumer = world.join(a), world.join(b)
    keys = [flow(f"f{number}", 1) for number in range(len(flows))]
    for number, (key, size) in enumerate(zip(keys, flows, strict=True)):
        if number < len(pauses_s):
            world.advance(pauses_s[number])
        world.open_sink(a, producer, key, size, 1e5)
        world.open_source(b, consumer, key, 1e5)
        for chunk in range(len(producer.sinks[key].slots)):
            world.fill(a, producer, key, chunk)
    offered_s = world.now_s
    while len(b.delivered) < len(flows):
        if not world.settle_step():
            next_s = a.core.next_deadline_s()
            assert next_s is not None
            world.advance(next_s - world.now_s)
    check_pace(world, rate)
    burst = PACER_BURST_CHUNKS * SLOT_BYTES
    assert world.now_s - offered_s <= max(0.0, sum(flows) - burst) / rate * 1.001 + 1e-6
    for key in keys:
        world.abort(a, producer, key)
    world.settle()
