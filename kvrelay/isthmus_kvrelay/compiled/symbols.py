"""The C functions that the compiled loops call, and how they find them: by names that are registered with LLVM.

XXH3 is the `xxhash` package's own, so there is one implementation of the checksum; its extension module exports the
C library's functions. Those that choose the widest vector instructions when they run are preferred.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL

import xxhash._xxhash

PREFIX = "isthmus_"
"""Of the registered names, so that none is taken for another library's."""
STATE_BYTES = 1024
"""For an `XXH3_state_t`, which has 576 in the releases of its stable format; and some, since it is not ours to say."""
STATE_ALIGNMENT = 64

_LIBC = {"send": ("send",), "recv": ("recv",), "errno": ("__errno_location",)}
_XXH3 = {
    "xxh3_reset": ("XXH3_64bits_reset_withSeed",),
    "xxh3_update": ("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
    "xxh3_digest": ("XXH3_64bits_digest",),
}


def addresses() -> dict[str, int]:
    """Registered name → address. Raises `AttributeError` naming what a library does not export, or `OSError`."""
    found = {}
    for library, wanted in ((CDLL(None), _LIBC), (CDLL(xxhash._xxhash.__file__), _XXH3)):
        for name, exported in wanted.items():
            found[PREFIX + name] = _address(library, exported)
    return found


def _address(library: CDLL, names: tuple[str, ...]) -> int:
    there = [name for name in names if hasattr(library, name)]
    function = getattr(library, there[0] if there else names[-1])
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
