"""The cross-vendor report's scenarios as cases, and the table of both answers to them."""

from __future__ import annotations

import dataclasses

from isthmus_planner.reproduce.constants import constants
from isthmus_planner.reproduce.cross_vendor import pair_of_nodes
from isthmus_planner.reproduce.published import published
from isthmus_planner.sim.hardware import Relay
from isthmus_sim.agreement.measure import Case, Compared

CONCURRENCY = (1, 8, 32)
REQUESTS_PER_CLIENT = 3
BOUND = 0.03
COMPARED = ("e2el_p50_s", "itl_mean_s", "tokens_per_s")


def cases(*, clients: tuple[int, ...] = CONCURRENCY, per_client: int = REQUESTS_PER_CLIENT) -> list[Case]:
    """H100 prefill, MI300X decode (`cross`), and MI300X for both (`single`)."""
    report, found = published().cross_vendor, constants()
    made = []
    for side in ("cross", "single"):
        prefill, decode = pair_of_nodes(report, found.cross_known, found.cross_fitted, side)
        if decode.resident_kv is not None:
            # What slows a lane by who sits at its end is no mechanism of real lanes: off in both.
            decode = dataclasses.replace(
                decode, resident_kv=dataclasses.replace(decode.resident_kv, receive_s_per_pair=0.0)
            )
        intake = found.cross_fitted.cross_intake_bytes_per_s
        if side == "single":
            intake = found.cross_fitted.single_intake_bytes_per_s
        lane = Relay(work_requests=None, host_bytes_per_s=intake)
        for name, lengths in report.scenarios.items():
            for count in clients:
                made.append(
                    Case(
                        name=f"{side} {name} C={count}",
                        prefill=prefill,
                        decode=decode,
                        lane=lane,
                        isl_tokens=lengths.isl_tokens,
                        osl_tokens=lengths.osl_tokens,
                        clients=count,
                        requests=per_client * count,
                        rate_per_s=report.rate_per_s,
                    )
                )
    return made


def table(compared: list[Compared]) -> str:
    head = (
        "| case | E2EL p50 s: simulator, services | off | ITL mean ms: simulator, services | off "
        "| tok/s: simulator, services | off |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for each in compared:
        sim, real = each.simulator, each.services
        lines.append(
            f"| {each.case.name} | {sim.e2el_p50_s:.2f}, {real.e2el_p50_s:.2f} | {each.off('e2el_p50_s'):+.2%} "
            f"| {1e3 * sim.itl_mean_s:.3f}, {1e3 * real.itl_mean_s:.3f} | {each.off('itl_mean_s'):+.2%} "
            f"| {sim.tokens_per_s:,.0f}, {real.tokens_per_s:,.0f} | {each.off('tokens_per_s'):+.2%} |"
        )
    return "\n".join(lines)


def worst(compared: list[Compared]) -> float:
    return max(abs(each.off(name)) for each in compared for name in COMPARED)
