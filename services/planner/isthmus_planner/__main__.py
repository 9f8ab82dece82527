"""``python -m isthmus_planner``: one planner, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import os
import sys

from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import serve
from isthmus_shared.runtime import run_from_environ

if __name__ == "__main__":
    sys.exit(run_from_environ("planner", PlannerConfig, serve, os.environ))
