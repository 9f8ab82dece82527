"""``python -m isthmus_prefill``: one worker that begins in the prefill role, configured by ``ISTHMUS_*``."""

from __future__ import annotations

import os
import sys

from isthmus_decode.role import DecodeRole
from isthmus_prefill.role import PrefillRole
from isthmus_shared.messages.health import Role
from isthmus_worker.launch import MakeRole, run_worker

if __name__ == "__main__":
    roles: dict[Role, MakeRole] = {
        Role.PREFILL: lambda config: PrefillRole(config.staging_wait_s),
        Role.DECODE: lambda _: DecodeRole(),
    }
    sys.exit(run_worker("prefill-worker", Role.PREFILL, roles, os.environ))
