"""`simulate`: a scenario in, figures out. No I/O; records of a trace come as batches from wherever they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus_planner.sim.building import build
from isthmus_planner.sim.collecting import collect
from isthmus_planner.sim.hardware import require
from isthmus_planner.sim.loop import go_on_with_trace, run, start
from isthmus_planner.sim.result import Result
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.trace_batch import TraceBatch
from isthmus_planner.sim.workload import FromTrace
from isthmus_planner.sim.world import DONE, World


def simulate(scenario: Scenario, trace: Iterable[TraceBatch] | None = None) -> Result:
    """`trace`: what the stream with `FromTrace` consists of, in order of time. ScenarioError: missing or empty."""
    traced = [index for index, stream in enumerate(scenario.streams) if isinstance(stream.arrivals, FromTrace)]
    require(bool(traced) == (trace is not None), "a trace belongs to a stream with FromTrace; give both or neither")
    batches = iter(trace) if trace is not None else iter(())
    world = build(scenario)
    start(world)
    while run(world) != DONE:
        world = _feed(world, traced[0], batches)
    if traced:
        row = world.streams[traced[0]]
        require(row.made > 0, "the trace is empty; give one with at least one request")
        lost = f"none of the {row.made} requests of the trace fits into any node's KV memory; give the nodes more"
        require(row.completed > 0, lost)
    return collect(scenario, world)


def _feed(world: World, stream: int, batches: Iterator[TraceBatch]) -> World:
    """The next part of the trace takes the place of the one that is used up."""
    shared = world.shared[0]
    batch = next((batch for batch in batches if len(batch)), None)
    if batch is None:
        shared.trace_over = 1
        return world
    shared.trace_next, shared.trace_count = 0, len(batch)
    world = world._replace(
        trace_at=batch.at_s,
        trace_isl=batch.isl_tokens,
        trace_osl=batch.osl_tokens,
        trace_block_end=batch.block_end,
        trace_blocks=batch.blocks,
    )
    go_on_with_trace(world, stream)
    return world
