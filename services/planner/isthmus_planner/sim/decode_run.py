"""A run of decode steps without anybody joining or leaving, in closed form.

Step i (from 0) of B sequences that hold K tokens takes `a + b·(K + iB) + c·max(0, K + iB - over)`, where c is the
resident-KV mechanism's. Each piece is an arithmetic series, so m steps take `m·first + slope·m(m-1)/2`, and the number
of steps within a time is the root of a quadratic.
"""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import compiled


@compiled
def series_s(steps: float, first: float, slope: float) -> float:
    return steps * first + slope * (steps * (steps - 1.0) * 0.5)


@compiled
def steps_below(tokens: float, batch: float, over: float) -> float:
    """How many steps from now on find no more than `over` tokens."""
    if tokens > over:
        return 0.0
    return math.floor((over - tokens) / batch) + 1.0


@compiled
def steps_s(steps: float, a: float, b: float, c: float, over: float, batch: float, tokens: float) -> float:
    """Seconds of so many steps."""
    first, slope = a + b * tokens, b * batch
    if c == 0.0:
        return series_s(steps, first, slope)
    below = steps_below(tokens, batch, over)
    if steps <= below:
        return series_s(steps, first, slope)
    there = tokens + below * batch
    rest = series_s(steps - below, a + b * there + c * (there - over), (b + c) * batch)
    return series_s(below, first, slope) + rest


@compiled
def series_steps(work: float, first: float, slope: float) -> float:
    """Real m with series_s(m) = work: the stable form of the quadratic's root, which holds for slope 0 too."""
    linear = first - 0.5 * slope
    return 2.0 * work / (linear + math.sqrt(linear * linear + 2.0 * slope * work))


@compiled
def steps_to(work: float, a: float, b: float, c: float, over: float, batch: float, tokens: float) -> float:
    """The least whole number of steps that take at least `work` seconds: the next boundary."""
    if work <= 0.0:
        return 0.0
    first, slope = a + b * tokens, b * batch
    steps = -1.0
    if c > 0.0:
        below = steps_below(tokens, batch, over)
        reached = series_s(below, first, slope)
        if work > reached:
            there = tokens + below * batch
            first, slope = a + b * there + c * (there - over), (b + c) * batch
            steps = below + math.ceil(series_steps(work - reached, first, slope))
    if steps < 0.0:
        steps = math.ceil(series_steps(work, first, slope))
    while steps > 0.0 and steps_s(steps - 1.0, a, b, c, over, batch, tokens) >= work:
        steps -= 1.0
    while steps_s(steps, a, b, c, over, batch, tokens) < work:
        steps += 1.0
    return steps
