"""``python -m isthmus_kvrelay.daemon``"""

from __future__ import annotations

import os
import sys

from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.service import serve
from isthmus_shared.runtime import run_from_environ


def main() -> int:
    return run_from_environ("kvrelay", RelayConfig, serve, os.environ, instance=lambda config: config.node_id)


if __name__ == "__main__":
    sys.exit(main())
