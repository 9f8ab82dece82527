"""Lengths of a trace's requests, whichever of the simulator's formats it has, of any size in flat memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from isthmus_planner.plan.mix import Kind
from isthmus_planner.sim.hardware import ScenarioError
from isthmus_planner.sim.traces import TraceError, read_trace
from isthmus_planner.sim.workload import Lengths
from isthmus_shared.errors import ConfigInvalid

MAX_SAMPLES = 100_000
"""Of a longer trace every second, fourth, ... request is kept: enough for its quantiles."""


def trace_kind(path: Path) -> Kind:
    """Its requests as one kind. Raises `ConfigInvalid` naming the line that is none."""
    kept: list[np.ndarray] = []
    seen, stride = 0, 1
    try:
        for batch in read_trace(path):
            # The trace's requests 0, stride, 2 · stride, ... wherever its batches begin.
            first = -seen % stride
            kept.append(np.stack([batch.isl_tokens, batch.osl_tokens])[:, first::stride])
            seen += len(batch)
            if sum(part.shape[1] for part in kept) > MAX_SAMPLES:
                kept, stride = [np.concatenate(kept, axis=1)[:, ::2]], stride * 2
    except TraceError as error:
        raise ConfigInvalid(f"{path}: {error}") from error
    except ScenarioError as error:
        raise ConfigInvalid(str(error)) from error
    if not seen:
        raise ConfigInvalid(f"the trace {path} is empty", todo="give one with at least one request")
    isl, osl = np.concatenate(kept, axis=1).tolist()
    return Kind("trace", 1.0, Lengths.of(isl), Lengths.of(osl))
