"""``python -m isthmus_prefill``: one worker in the prefill role, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import os
import sys

from isthmus_prefill.role import PrefillRole
from isthmus_worker.launch import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("prefill-worker", lambda config: [PrefillRole(config.staging_wait_s)], os.environ))
