"""Records of a trace, a part at a time, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus_planner.sim.hardware import require


@dataclass(frozen=True, slots=True)
class TraceBatch:
    """Requests in order of their time. Block hashes of request i are `blocks[block_end[i - 1] : block_end[i]]`."""

    at_s: Any
    """float64 (n): since the trace's start."""
    isl_tokens: Any
    """int64 (n)"""
    osl_tokens: Any
    block_end: Any
    blocks: Any
    """int64: the hashes of all, one request after the other."""

    @classmethod
    def of(
        cls,
        at_s: list[float],
        isl_tokens: list[int],
        osl_tokens: list[int],
        blocks: list[list[int]] | None = None,
    ) -> TraceBatch:
        count = len(at_s)
        require(len(isl_tokens) == len(osl_tokens) == count, "a trace's times and lengths differ in number")
        hashes = blocks if blocks is not None else [[] for _ in range(count)]
        require(len(hashes) == count, "a trace's times and block hashes differ in number")
        return cls(
            np.array(at_s, np.float64),
            np.array(isl_tokens, np.int64),
            np.array(osl_tokens, np.int64),
            np.cumsum([len(each) for each in hashes], dtype=np.int64),
            np.array([block for each in hashes for block in each], np.int64),
        )

    def __len__(self) -> int:
        return len(self.at_s)
