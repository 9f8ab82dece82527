"""``python -m isthmus_planner``: one planner, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import gc
import os
import sys

from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import serve
from isthmus_shared.runtime import run_from_environ
from isthmus_shared.service import ServiceRuntime

YOUNG_OBJECTS = 20_000
"""Made since the last look for cycles, before the next: some hundred routes' worth. Nearly all end by themselves."""


async def serve_undisturbed(runtime: ServiceRuntime[PlannerConfig]) -> None:
    # Modules and models live as long as the process: a look for cycles need not go through them each time, which
    # takes tens of milliseconds, and a route should take a tenth of one.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    await serve(runtime)


if __name__ == "__main__":
    sys.exit(run_from_environ("planner", PlannerConfig, serve_undisturbed, os.environ))
