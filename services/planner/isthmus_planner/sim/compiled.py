"""Functions that numba compiles. They are plain Python too: with NUMBA_DISABLE_JIT=1 they run as they stand.

Neither fast-math nor contraction is in force, so that both forms, on any machine, give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.extending import overload

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """To be called from Python. Cached on disk beside the source, or in the user's cache folder if that cannot be
    written."""
    try:
        return _compile(function, cache=True)
    except RuntimeError:  # numba found no folder to write to
        return _compile(function)


def inner(function: F) -> F:
    """To be called from compiled functions only, whose cache holds it too: without what turns Python's arguments into
    machine words, which for a whole world takes longer to compile than the function itself."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compile(function: F, **options: bool) -> F:
    """Without numba's run-time (`_nrt`): what compiled code is given stays its caller's, and nothing is allocated, so
    that no reference is counted; counting those of a world's arrays at each call took nine tenths of the time."""
    njit: Any = numba.njit
    return cast(F, njit(error_model="numpy", _nrt=False, **options)(function))


def sources_fingerprint() -> str:
    """Of all that is compiled. numba's cache looks at a function's own file only, not at those of what it calls; with
    this in the type of what every function is given, a change anywhere compiles everything anew."""
    texts = (source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py")))
    compiled_ones = [text for text in texts if b"sim.compiled import" in text or b"def compiled(" in text]
    return hashlib.sha256(b"\0".join(compiled_ones)).hexdigest()[:16]


def constant(value: int) -> int:
    """One that functions are given: of Python's own, numba would compile a function once for each."""
    return cast(int, np.int64(value))


def u64(value: int) -> int:
    """An integer that wraps at 2^64 when compiled; uncompiled, its user masks it."""
    return int(value)


@overload(u64)
def _compiled_u64(value: Any) -> Any:
    def wrapping(value: Any) -> Any:
        return numba.uint64(value)

    return wrapping
