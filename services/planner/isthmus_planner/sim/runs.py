"""A decode node between two boundaries: when its run of steps ends, cut short when somebody wants to join."""

from __future__ import annotations

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.decode_run import steps_s, steps_to
from isthmus_planner.sim.event_queue import schedule
from isthmus_planner.sim.measure import count_steps
from isthmus_planner.sim.world import RUNNING, World

LEAST_SPEED = 0.02
"""Of decode, however much is received: one step in fifty still happens, as one does on a swamped host."""


@inner
def _work_s(w: World, n: int, steps: float) -> float:
    node = w.nodes[n]
    a = w.a_s[node.a_offset + node.running - 1]
    return steps_s(steps, a, node.b, node.c, node.over, float(node.running), node.tokens)


@inner
def _schedule_end(w: World, n: int, now: float) -> None:
    node = w.nodes[n]
    at_s = node.run_at + (_work_s(w, n, node.run_steps) - node.run_work) / node.speed
    schedule(w, len(w.streams) + n, max(now, at_s))


@inner
def start_run(w: World, n: int, now: float) -> None:
    """Until the first of the running sequences ends."""
    node = w.nodes[n]
    node.doing = RUNNING
    node.run_begin = now
    node.run_at = now
    node.run_work = -node.run_stall
    node.run_steps = w.finish[n, 0] - node.steps_done
    node.run_counted = 0.0
    node.speed = max(LEAST_SPEED, 1.0 - node.share)
    _schedule_end(w, n, now)


@inner
def cut_run(w: World, n: int, now: float) -> None:
    """Somebody may join: the run ends at the next boundary."""
    node = w.nodes[n]
    work = node.run_work + (now - node.run_at) * node.speed
    a = w.a_s[node.a_offset + node.running - 1]
    steps = steps_to(work, a, node.b, node.c, node.over, float(node.running), node.tokens)
    if steps < node.run_steps:
        node.run_steps = steps
        _schedule_end(w, n, now)


@inner
def set_share(w: World, n: int, share: float, now: float) -> None:
    """Receiving takes another part of the time from now on."""
    node = w.nodes[n]
    node.share = share
    if node.doing != RUNNING:
        return
    work = node.run_work + (now - node.run_at) * node.speed
    a = w.a_s[node.a_offset + node.running - 1]
    steps = steps_to(work, a, node.b, node.c, node.over, float(node.running), node.tokens)
    if _work_s(w, n, steps) > work:
        steps -= 1.0
    count_steps(w, n, min(steps, node.run_steps))
    node.run_work = work
    node.run_at = now
    node.speed = max(LEAST_SPEED, 1.0 - share)
    _schedule_end(w, n, now)


@inner
def finish_run(w: World, n: int, now: float) -> None:
    """Count what happened and move everybody on; who has ended is the caller's to see."""
    node = w.nodes[n]
    elapsed = now - node.run_begin
    node.decode_busy += elapsed
    node.batch_integral += elapsed * node.running
    if node.run_steps > 0.0:
        count_steps(w, n, node.run_steps)
        steps = int(node.run_steps)
        node.steps += steps
        node.steps_done += steps
        node.decoded_tokens += steps * node.running
        node.tokens += node.run_steps * node.running
        node.step_end = now
    node.run_stall = 0.0
