"""How often a planner's process looks for cycles of garbage."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Made since the last look, before the next: some hundred routes' worth. Nearly all end by themselves."""


def look_less_often() -> None:
    """To be called once what stays is there: modules and models live as long as the process, and a look for cycles need
    not go through them each time. That takes tens of milliseconds, and a route should take a tenth of one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
