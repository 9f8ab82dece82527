"""Bugs put back on purpose: how many seeds does the simulation need to find each?

A bug is one line of a service's source that is another line: the method is compiled anew with it, in a process of its
own. The first three are those that the simulation must find within 500 seeds.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_base import SagaBase
from isthmus_ingress.saga_parties import Attempt
from isthmus_kvrelay.core.credit import Credits
from isthmus_kvrelay.core.quarantine import Quarantine
from isthmus_planner.leader.lease import Lease
from isthmus_shared.messages.health import Role
from isthmus_sim.plan import draw_plan
from isthmus_sim.simulation import run
from isthmus_worker.liveness import IngressLife
from isthmus_worker.requests import Requests
from isthmus_worker.sessions import Sessions

MAX_SEEDS = 500


@dataclass(frozen=True)
class Mutant:
    name: str
    of: type
    method: str
    lines: tuple[tuple[str, str], ...]
    """(what is there, what is there instead)."""
    what: str
    must: bool = False
    """Within 500 seeds."""


MUTANTS = (
    Mutant(
        "stale-generation",
        Requests,
        "admit",
        (
            ("if cancelled is not None and record.generation <= cancelled:", "if False:"),
            ("if known is not None and record.generation <= known.generation:", "if False:"),
        ),
        "a worker takes an attempt that is over, or older than the one that it has",
        must=True,
    ),
    Mutant(
        "credit-twice",
        Credits,
        "take_back_chunk",
        (("account.take_back(amount)", "account.take_back(2 * amount)"),),
        "a relay returns the credit of a flow that has ended twice",
        must=True,
    ),
    Mutant(
        "lost-cancel",
        SagaBase,
        "_end_party",
        (
            (
                "self._effects.append(SendCancel(party.worker, party.generation, reason))",
                "self._effects += [] if _between(self) else [SendCancel(party.worker, party.generation, reason)]",
            ),
        ),
        "a request that ends after prefill's hand-over and before decode's first token is cancelled nowhere",
        must=True,
    ),
    Mutant(
        "stale-tokens",
        Attempt,
        "party",
        ((" and party.generation == generation", ""),),
        "an ingress takes the tokens of an older attempt",
    ),
    Mutant(
        "tokens-twice",
        Saga,
        "_take",
        (("new = seq.token_ids[known : known + room]", "new = seq.token_ids[:room]"),),
        "an ingress delivers tokens again that came again",
    ),
    Mutant(
        "no-fence",
        Quarantine,
        "begin",
        (("led.staging.pin(ref, Pin.SENDER)", "pass"),),
        "a landing slot is used again before its sender is quiet",
    ),
    Mutant(
        "wrong-life",
        Sessions,
        "check_party",
        (("if incarnation != self.worker.incarnation:", "if False:"),),
        "a worker takes messages that were meant for its former life",
    ),
    Mutant(
        "orphans",
        IngressLife,
        "sweep",
        (("> self._lost_s", "> 1e9"),),
        "a worker keeps what it holds for an ingress that is gone",
    ),
    Mutant(
        "early-free",
        Sessions,
        "_free",
        (
            (
                "self._closing[record.engine_id] = _Closing(record, fault)",
                "await self._abort_transfer(record.flow, fault)",
            ),
        ),
        "a transfer is given up at the relay while the engine may still touch its slots",
    ),
    Mutant(
        "long-lease",
        Lease,
        "_lead",
        (
            (
                "until_s = sent_s + self._times.lease_s - self._times.margin_s",
                "until_s = sent_s + 2 * self._times.lease_s",
            ),
        ),
        "a leader acts on after its lease",
    ),
)


def _between(saga: SagaBase) -> bool:
    attempt = saga._attempt
    prefill = None if attempt is None else attempt.parties.get(Role.PREFILL)
    return attempt is not None and prefill is not None and prefill.handed_off and not attempt.decode_heard


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """That class with that line. Raises `AssertionError` when the line is not there (any more), once and no more."""
    original = inspect.getattr_static(mutant.of, mutant.method)
    source = textwrap.dedent(inspect.getsource(original))
    for line, instead in mutant.lines:
        found = source.count(line)
        assert found == 1, f"{mutant.name}: {mutant.method} has {found} times {line!r}"
        source = source.replace(line, instead)
    scope: dict[str, Any] = {**vars(inspect.getmodule(mutant.of)), "_between": _between}
    exec(compile("from __future__ import annotations\n" + source, f"<{mutant.name}>", "exec"), scope)  # noqa: S102
    with patch.object(mutant.of, mutant.method, scope[mutant.method]):
        yield


@dataclass(frozen=True)
class Found:
    name: str
    seed: int | None
    problem: str
    took_s: float


def look_for(name: str, first: int, seeds: int) -> Found:
    """The first seed that notices that bug."""
    mutant = next(each for each in MUTANTS if each.name == name)
    began_s = time.process_time()
    with applied(mutant):
        for seed in range(first, first + seeds):
            problems = run(draw_plan(seed)).problems
            if problems:
                text = problems[0].strip().splitlines()[-1]
                return Found(name, seed, text[:160], time.process_time() - began_s)
    return Found(name, None, "", time.process_time() - began_s)


def main(argv: Sequence[str] | None = None, say: Callable[[str], object] = sys.stdout.write) -> int:
    parser = argparse.ArgumentParser(description="Bugs put back on purpose, and the first seed that finds each.")
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="at most, per bug")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", choices=[mutant.name for mutant in MUTANTS], help="this one")
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if args.only is None or mutant.name in args.only]
    missed = 0
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=1) as pool:
        looks = [pool.submit(look_for, mutant.name, args.first, args.seeds) for mutant in chosen]
        for mutant, look in zip(chosen, looks, strict=True):
            found = look.result()
            missed += mutant.must and found.seed is None
            where = f"not within {args.seeds} seeds" if found.seed is None else f"seed {found.seed}: {found.problem}"
            say(f"{mutant.name} ({mutant.what}): {where} [{found.took_s:.0f} CPU s]\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
