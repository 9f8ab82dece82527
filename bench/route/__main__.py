"""How long a route takes to choose, by size of the cluster, and how many a planner process answers over NATS.

    python bench/route [--sizes 8,64,1000] [--routes 2000] [--seconds 5] [--workers 64] [--clients 8] [--json FILE]

The choice is timed alone, on one core, in a view that beats and assignments keep changing; its CPU time stands beside
its wall time, since on a machine that does other things only the first means something. Over the bus, a real
nats-server and a real planner process answer clients that each keep some questions under way, while all workers'
heartbeats go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from choosing import Choosing, choosing
from over_nats import OverNats, over_nats

SIZES = (8, 64, 256, 1000, 4096)


def table(rows: list[Choosing]) -> str:
    lines = [
        "| workers | targets | p50 µs | p99 µs | p50 CPU µs | p99 CPU µs | commit µs | beat µs | remembering µs |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = (row.p50_us, row.p99_us, row.cpu_p50_us, row.cpu_p99_us, row.commit_us, row.beat_us, row.explain_us)
        targets = "yes" if row.targets else "no"
        lines.append(f"| {row.workers} | {targets} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    return "\n".join(lines)


def bus_line(found: OverNats) -> str:
    own = 1e6 / found.cpu_us_per_route
    return (
        f"{found.routes_per_s:.0f} routes/s over NATS with {found.workers} workers, {found.clients} clients and "
        f"{found.under_way} questions under way; the planner's process took {found.cpu_us_per_route:.0f} µs of CPU for "
        f"each ({found.cpu_share:.0%} of a core): {own:.0f} routes/s on a core of its own; round trip p50 "
        f"{found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms; {found.refused} refused"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="workers, half of them in each role")
    parser.add_argument("--routes", type=int, default=2000, help="timed for each size")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load over the bus; 0: none")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--under-way", type=int, default=16, help="questions of each client")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    rows = [choosing(size, options.routes, targets=targets) for size in sizes for targets in (False, True)]
    print(table(rows))
    found: OverNats | None = None
    if options.seconds > 0:
        found = asyncio.run(over_nats(options.workers, options.clients, options.under_way, options.seconds))
        print(f"\n{bus_line(found)}")
    if options.json is not None:
        told = {"choosing": [row.as_dict() for row in rows], "over_nats": None if found is None else found.as_dict()}
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
