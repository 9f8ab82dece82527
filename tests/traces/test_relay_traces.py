"""What the relay's cores say to each other, event by event, against golden scripts.

A line ``a < Event`` is what core `a` was told, ``a > Effect`` what it wants done. When a change is meant, rewrite the
scripts with ``ISTHMUS_REWRITE_TRACES=1`` and review the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from isthmus_kvrelay.core.events import Effect, Event, FlowKey, Grant, SlotUse
from isthmus_shared.errors import Fault
from isthmus_testing.relay_world import SLOT_BYTES, Node, World, flow

KEY = flow("t", 1)
FOLDER = Path(__file__).parent


class Recorded(World):
    def __init__(self, names: str) -> None:
        super().__init__(names, total_slots=8, retain_bytes=4 * SLOT_BYTES)
        self.lines: list[str] = []

    def tell(self, node: Node, event: Event) -> None:
        self.lines.append(f"{node.name} < {render(event)}")
        super().tell(node, event)

    def _carry_out(self, node: Node, effect: Effect) -> None:
        self.lines.append(f"{node.name} > {render(effect)}")
        super()._carry_out(node, effect)


def render(value: object) -> str:
    match value:
        case FlowKey():
            return f"{value.transfer_id}/{value.generation}"
        case SlotUse():
            return f"slot{value.slot}.{value.use}"
        case Grant():
            return f"{value.chunk}→{render(value.into)}"
        case Fault():
            return value.code
        case tuple():
            return f"[{' '.join(map(render, value))}]"
    if is_dataclass(value):
        shown = " ".join(f"{field.name}={render(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__} {shown}".rstrip()
    return str(value)


def begin(world: World) -> None:
    """A producer on the first node, a consumer on the last, two chunks offered and asked for."""
    first, last = next(iter(world.nodes.values())), list(world.nodes.values())[-1]
    world.join(first)
    world.join(last)
    world.open_sink(first, next(iter(first.clients.values())), KEY, 2 * SLOT_BYTES - 3, 60.0)
    world.open_source(last, list(last.clients.values())[-1], KEY, 60.0)


def fill(world: World, *chunks: int) -> None:
    node = world.nodes["a"]
    client = next(iter(node.clients.values()))
    for chunk in chunks:
        world.fill(node, client, KEY, chunk)


def delivery(world: World) -> None:
    begin(world)
    fill(world, 0)
    _move(world)
    fill(world, 1)
    world.seal(world.nodes["a"], next(iter(world.nodes["a"].clients.values())), KEY)
    world.settle()


def same_relay(world: World) -> None:
    begin(world)
    fill(world, 0, 1)
    world.settle()


def producer_dies(world: World) -> None:
    begin(world)
    fill(world, 0)
    _move(world)
    node = world.nodes["a"]
    world.leave(node, next(iter(node.clients.values())))
    world.settle()


def revoked_under_a_receive(world: World) -> None:
    """The consumer dies while a chunk is being received: that slot stays in quarantine until the receive is over."""
    begin(world)
    fill(world, 0, 1)
    world.answer_dial(world.nodes["b"], ok=True)
    (wire,) = world.wires
    while wire.control[0] or wire.control[1]:
        world.deliver_control(wire, 0 if wire.control[0] else 1)
    world.send(wire, 1, 0)
    world.begin_receive(wire, 1, 0, keep_copy=False)
    node = world.nodes["b"]
    world.leave(node, next(iter(node.clients.values())))
    world.end_receive(node, next(iter(node.claimed)), damaged=False, repeat=False)
    world.settle()


def lane_dies(world: World) -> None:
    begin(world)
    fill(world, 0)
    _move(world)
    world.cut(world.wires[0])
    world.settle()


def taken_over(world: World) -> None:
    """Another destination takes a sealed flow from the first one, which is alive; its late word changes nothing."""
    begin(world)
    fill(world, 0, 1)
    world.seal(world.nodes["a"], next(iter(world.nodes["a"].clients.values())), KEY)
    world.answer_dial(world.nodes["c"], ok=True)
    while any(wire.control[0] or wire.control[1] for wire in world.wires):
        for wire in world.wires:
            for side in (0, 1):
                if wire.control[side]:
                    world.deliver_control(wire, side)
    world.join(world.nodes["b"])
    world.open_source(world.nodes["b"], next(iter(world.nodes["b"].clients.values())), KEY, 60.0, pull=2)
    world.settle()


def asked_for_again(world: World) -> None:
    """A delivered flow is retained, and serves a second destination without its producer."""
    begin(world)
    fill(world, 0, 1)
    producer = next(iter(world.nodes["a"].clients.values()))
    world.seal(world.nodes["a"], producer, KEY)
    _move(world)
    world.leave(world.nodes["a"], producer)
    world.join(world.nodes["b"])
    world.open_source(world.nodes["b"], next(iter(world.nodes["b"].clients.values())), KEY, 60.0, pull=2)
    world.settle()


def credit_with_the_pull(world: World) -> None:
    """The second transfer over a lane is asked for with credit; a third, whose source has no staging yet, declines."""
    delivery(world)
    a, b = world.nodes["a"], world.nodes["b"]
    producer, consumer = next(iter(a.clients.values())), next(iter(b.clients.values()))
    in_the_way = flow("w", 1)
    for key in (flow("u", 1), flow("v", 1)):
        if key == flow("v", 1):
            world.open_sink(a, producer, in_the_way, 4 * SLOT_BYTES, 60.0)
        world.open_sink(a, producer, key, 2 * SLOT_BYTES, 60.0)
        world.open_source(b, consumer, key, 60.0)
        _move(world)
        if key == flow("v", 1):
            world.abort(a, producer, in_the_way)
            _move(world)
        for chunk in range(2):
            world.fill(a, producer, key, chunk)
        world.seal(a, producer, key)
        _move(world)
    world.settle()


def _move(world: World) -> None:
    while world.settle_step():
        pass


SCENARIOS: dict[str, tuple[str, Callable[[World], None]]] = {
    "relay_delivery": ("ab", delivery),
    "relay_same_relay": ("a", same_relay),
    "relay_producer_dies": ("ab", producer_dies),
    "relay_revoked_under_a_receive": ("ab", revoked_under_a_receive),
    "relay_lane_dies": ("ab", lane_dies),
    "relay_taken_over": ("abc", taken_over),
    "relay_asked_for_again": ("abc", asked_for_again),
    "relay_credit_with_the_pull": ("ab", credit_with_the_pull),
}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_cores_say_what_the_script_says(name: str) -> None:
    names, scenario = SCENARIOS[name]
    world = Recorded(names)
    scenario(world)
    script = FOLDER / f"{name}.txt"
    text = "\n".join(world.lines) + "\n"
    if os.environ.get("ISTHMUS_REWRITE_TRACES"):
        script.write_text(text, encoding="utf-8")
    assert text == script.read_text(encoding="utf-8")
