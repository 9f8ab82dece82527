"""How much memory this process has."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Now, with what nobody refers to collected."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
