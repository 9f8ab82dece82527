"""Schemathesis against the real ingress, on its own description of itself.

    python -m isthmus_testing.schemathesis_run --seconds 600

The cluster behind it is scripted, so that every answer is the doing of the ingress. A finding is an answer of 5xx, one
that the description does not allow, or memory that grows: after a quarter of the time, by over `MAX_GROWTH_BYTES`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from isthmus_testing.ingress import ingress_stack, write_text_folder
from isthmus_testing.memory import resident_bytes

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
MAX_GROWTH_BYTES = 48 << 20
"""Of a process of some 150 MiB: the allocator's own fragments, after thousands of bodies of up to megabytes."""
WARM_UP = 0.25


async def run(seconds: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with ingress_stack(write_text_folder(Path(folder) / "model"), "ok") as (ingress, _cluster, _broker):
            tester = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", f"http://{ingress.address}/openapi.json"),
                *("--max-time", str(seconds), "--checks", ",".join(CHECKS), "--seed", str(seed), "--workers", "2"),
                *("--request-timeout", "30", "--suppress-health-check", "all", "--warnings", "off"),
                cwd=folder,
            )
            ended = asyncio.create_task(tester.wait())
            await asyncio.wait({ended}, timeout=seconds * WARM_UP)
            warm_bytes = resident_bytes()
            status = await ended
            grown_bytes = resident_bytes() - warm_bytes
    sys.stdout.write(f"schemathesis: seed {seed}, exit {status}, memory after warm-up {grown_bytes / 2**20:+.1f} MiB\n")
    if grown_bytes > MAX_GROWTH_BYTES:
        sys.stderr.write(f"memory grew by more than {MAX_GROWTH_BYTES >> 20} MiB\n")
        return 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    return asyncio.run(run(given.seconds, secrets.randbelow(2**32) if given.seed is None else given.seed))


if __name__ == "__main__":
    sys.exit(main())
