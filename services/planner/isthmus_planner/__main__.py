"""``python -m isthmus_planner``: one planner, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import os
import sys

from isthmus_planner.config import PlannerConfig
from isthmus_planner.garbage import look_less_often
from isthmus_planner.service import serve
from isthmus_shared.runtime import run_from_environ
from isthmus_shared.service import ServiceRuntime


async def serve_undisturbed(runtime: ServiceRuntime[PlannerConfig]) -> None:
    look_less_often()
    await serve(runtime)


if __name__ == "__main__":
    sys.exit(run_from_environ("planner", PlannerConfig, serve_undisturbed, os.environ))
