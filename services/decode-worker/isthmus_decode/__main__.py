"""``python -m isthmus_decode``: one worker in the decode role, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import os
import sys

from isthmus_decode.role import DecodeRole
from isthmus_worker.launch import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("decode-worker", lambda config: [DecodeRole()], os.environ))
