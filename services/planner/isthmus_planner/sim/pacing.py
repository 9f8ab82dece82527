"""A flow's chunks through a lane's token bucket, in closed form.

The rule is `isthmus_kvrelay.core.pacer.Pacer`'s: a chunk leaves when the bucket holds its size, and takes it. On a wire
of w bytes per second each chunk departs at the later of its own time and its predecessor's end, so the last one departs
at the maximum, over all chunks k, of (k's own time + the wire's time from k on). That is linear in k while chunks are
equal: the first, the last equal one and the last of all decide.
"""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import compiled


@compiled
def level_at(level: float, at_s: float, now_s: float, rate: float, burst: float) -> float:
    """What the bucket holds; `rate` may be infinite."""
    if rate == math.inf:
        return burst
    return min(burst, level + rate * max(0.0, now_s - at_s))


@compiled
def send_s(size: float, chunk: float, level: float, rate: float, wire: float) -> float:
    """Seconds from now until all of `size` bytes have left, the last one included."""
    if rate == math.inf:
        return size / wire
    chunks = math.ceil(size / chunk)
    first, last = min(size, chunk), size - (chunks - 1.0) * chunk
    by_wire = max(0.0, (first - level) / rate) + size / wire
    by_pace = (size - level) / rate + last / wire
    if chunks > 1.0:
        by_pace = max(by_pace, (size - last - level) / rate + (chunk + last) / wire)
    return max(by_wire, by_pace)


@compiled
def level_after(size: float, chunk: float, level: float, rate: float, wire: float, burst: float) -> float:
    """What the bucket holds just after the last chunk's departure, `last / wire` before `send_s`."""
    if rate == math.inf:
        return burst
    chunks = math.ceil(size / chunk)
    last = size - (chunks - 1.0) * chunk
    departs_s = send_s(size, chunk, level, rate, wire) - last / wire
    return max(0.0, min(level + rate * departs_s - size, burst - last))


@compiled
def sent_bytes(elapsed_s: float, size: float, level: float, rate: float, wire: float) -> float:
    """How much has left after so long, as a fluid."""
    by_wire = wire * elapsed_s
    if rate == math.inf:
        return min(size, by_wire)
    return max(0.0, min(size, by_wire, level + rate * elapsed_s))
