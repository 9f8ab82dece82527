"""`python -m isthmus_ingress`"""

from __future__ import annotations

import gc
import os
import sys

from isthmus_ingress.config import IngressConfig
from isthmus_ingress.service import Ingress
from isthmus_shared.runtime import run_from_environ
from isthmus_shared.service import ServiceRuntime

YOUNG_OBJECTS = 20_000
"""Made since the last look for cycles, before the next: some forty requests' worth. Nearly all end by themselves."""


async def serve(runtime: ServiceRuntime[IngressConfig]) -> None:
    # Modules, models and tables live as long as the process: a look for cycles need not go through them each time,
    # which takes tens of milliseconds in the middle of everyone's streams.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    await Ingress(runtime).run()


if __name__ == "__main__":
    sys.exit(run_from_environ("ingress", IngressConfig, serve, os.environ, instance=lambda config: config.id))
