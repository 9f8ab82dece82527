"""The relay's workloads through raw sockets, NIXL and Mooncake as well, in turn in one run, and the ratios.

    python bench/compare_transfer.py [--rounds 5] [--only relay,one socket,nixl] [--json FILE]

NIXL and Mooncake are measured when they are installed (`pip install --no-deps nixl-cu12
mooncake-transfer-engine-non-cuda`), over TCP: their production path is RDMA, so nothing here says anything of that.
Each round starts the processes of each contender anew, one contender after another, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from isthmus_kvrelay.bench import report
from isthmus_kvrelay.bench.contenders import Contender, PairContender, RelayContender, sockets
from isthmus_kvrelay.bench.transfer import measure

NIXL = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
MOONCAKE = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}


def contenders(folder: Path) -> dict[str, Callable[[], Contender]]:
    number = count()

    def relay(checksums: bool, copies: bool) -> RelayContender:
        place = folder / str(next(number))
        place.mkdir()
        return RelayContender(place, checksums=checksums, copies=copies)

    found: dict[str, Callable[[], Contender]] = {
        "one socket": lambda: sockets(1),
        "two sockets": lambda: sockets(2),
        "two sockets, unpaced": lambda: sockets(2, unpaced=True),
        "relay": lambda: relay(True, False),
        "relay, no checksums": lambda: relay(False, False),
        "relay and copies": lambda: relay(True, True),
    }
    if importlib.util.find_spec("nixl_cu12") is not None:
        nixl = ("peer_process", "--engine", "nixl")
        found["NIXL"] = lambda: PairContender(*nixl, environ=NIXL)
        found["NIXL, no progress thread"] = lambda: PairContender(*nixl, "--no-progress-thread", environ=NIXL)
    if importlib.util.find_spec("mooncake") is not None:
        found["Mooncake"] = lambda: PairContender("peer_process", "--engine", "mooncake", environ=MOONCAKE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="contenders, separated by semicolons")
    parser.add_argument("--json", type=Path, help="write every round there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as scratch:
        known = contenders(Path(scratch))
        names = arguments.only.split(";") if arguments.only else list(known)
        for missing in sorted({"NIXL", "Mooncake"} - set(known)):
            print(f"{missing} is not installed and is left out", file=sys.stderr)
        chosen = {name: known[name] for name in names}
        figures = measure(chosen, rounds=arguments.rounds, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(report.transfer_table(figures))
    print(report.ratio_table(figures))
    if arguments.json:
        rounds = {name: [dataclasses.asdict(each) for each in found] for name, found in figures.items()}
        arguments.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
