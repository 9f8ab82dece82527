"""`python -m isthmus_ingress`"""

from __future__ import annotations

import os
import sys

from isthmus_ingress.config import IngressConfig
from isthmus_ingress.service import Ingress
from isthmus_shared.runtime import run_from_environ
from isthmus_shared.service import ServiceRuntime


async def serve(runtime: ServiceRuntime[IngressConfig]) -> None:
    await Ingress(runtime).run()


if __name__ == "__main__":
    sys.exit(run_from_environ("ingress", IngressConfig, serve, os.environ, instance=lambda config: config.id))
