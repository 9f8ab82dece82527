"""``python -m isthmus_sim.agreement``: how far the real services, in virtual time, are from the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from isthmus_sim.agreement import pacing, report
from isthmus_sim.agreement.measure import Case, Compared, by_services, by_simulator

FAILED = 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="isthmus_sim.agreement", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=list(report.CONCURRENCY))
    parser.add_argument("--per-client", type=int, default=report.REQUESTS_PER_CLIENT, help="requests of each client")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(arguments)
    if min([*args.clients, args.per_client]) < 1:
        parser.error("--clients and --per-client are at least 1")
    all_cases = report.cases(clients=tuple(args.clients), per_client=args.per_client)
    chosen = [case for case in all_cases if args.only in case.name]
    if not chosen:
        parser.error(f"no case's name has {args.only!r} in it; there are {', '.join(case.name for case in all_cases)}")
    compared = []
    for case in chosen:
        began_s = time.process_time()
        compared.append(Compared(case, by_simulator(case, 0), by_services(case, 0)))
        sys.stderr.write(f"{case.name}: {time.process_time() - began_s:.0f} CPU s\n")
    say = sys.stdout.write
    say(report.table(compared))
    worst = report.worst(compared)
    say(f"\n\nworst: {worst:.2%} (bound {report.BOUND:.0%})\n")
    burst = max((case for case in chosen if case.name.startswith("cross 8K/1K")), key=_clients, default=None)
    paced = list(pacing.paced(burst)) if burst is not None else []
    if burst is not None:
        say(f"\n{burst.name}, receiving takes host time from decode's steps:\n\n{pacing.table(paced)}\n")
    if args.json is not None:
        figures = {
            each.case.name: {
                "simulator": dataclasses.asdict(each.simulator),
                "services": dataclasses.asdict(each.services),
            }
            for each in compared
        }
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if worst <= report.BOUND else FAILED


def _clients(case: Case) -> int:
    return case.clients


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
