"""The comparison as a page: docs/routing-goodput.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from isthmus_planner.evaluate.calibration import LEARNED_AFTER, SHOWN_LOAD, Learned
from isthmus_planner.evaluate.fleet import LANE_BYTES_PER_S, MIXES, MODEL
from isthmus_planner.evaluate.runs import BEST_THRESHOLD, LOAD, PLANNER, THRESHOLDS, USUAL_THRESHOLD, Cell
from isthmus_planner.evaluate.workload import TRACES
from isthmus_shared.messages.route import Slo

RULES = (
    ("round-robin", "round-robin"),
    ("least-loaded", "least-loaded"),
    (f"threshold {USUAL_THRESHOLD}", f"threshold {USUAL_THRESHOLD}"),
    (BEST_THRESHOLD, BEST_THRESHOLD),
)
GUARDED = (
    ("round-robin + 429", "round-robin"),
    ("least-loaded + 429", "least-loaded"),
    (f"{BEST_THRESHOLD} + 429", BEST_THRESHOLD),
)


def page(cells: Sequence[Cell], learned: Sequence[Learned], command: str) -> str:
    return "\n".join([*_head(command), *_summary(cells), *_table(cells), *_accuracy(cells), *learning(learned), ""])


HEAD = """\
# Goodput of routing

Remade by `{command}` (some minutes on one core; the same code gives the same bytes). Goodput is the share of all
requests that met both of their targets; what was refused met none.

- **Cluster**: simulated engines (`isthmus_planner.evaluate`) with the cost model's laws for {model}: continuous
  batching, chunked prefill, KV room, preemption; KV crosses first come, first served, at {lane:g} GB/s a node.
- **Mixes**: {mixes}.
- **Traces**: the first requests of two public ones ([their origin](https://github.com/Azure/AzurePublicDataset),
  [Mooncake's](https://github.com/kvcache-ai/Mooncake)), their lengths in their order, block hashes left out.
  *steady*: Poisson; *bursty*: a quarter of every 20 s at 2.5 times the mean rate; *recorded*: the trace's own times,
  stretched to the rate.
- **Targets**: {targets}.
- **Rate**: {load:g} of an upper bound that no policy reaches (every moment of every worker used, decode batches that
  just meet the ITL target).
- **The planner** is the service's own code, `isthmus_planner.desk`: it sees heartbeats twice a second and what became
  of requests, starts from its default constants, and knows neither the engines' laws nor output lengths.
- **The rules** see each start and end of what they placed at once and without error. Where a mix has workers that
  only prefill they divide every request; the threshold rule divides prompts above so many tokens. *{best}*: of
  {thresholds} the best in hindsight, row by row. *+ 429*: the same rule behind the planner's own admission and
  predictions.
"""


def _head(command: str) -> list[str]:
    targets = "; ".join(f"{trace.name}: {_targets(trace.slo)}" for trace in TRACES)
    text = HEAD.format(
        command=command,
        model=MODEL,
        lane=LANE_BYTES_PER_S / 1e9,
        mixes="; ".join(f"*{mix.name}*: {mix.title}" for mix in MIXES),
        targets=targets,
        load=LOAD,
        best=BEST_THRESHOLD,
        thresholds=", ".join(map(str, THRESHOLDS)),
    )
    return [text]


def _targets(slo: Slo) -> str:
    return f"TTFT {slo.ttft_s or 0:g} s, mean ITL {1e3 * (slo.itl_s or 0):g} ms"


def _summary(cells: Sequence[Cell]) -> list[str]:
    lines = ["| planner's goodput over that of | least | median | rows ahead |", "| --- | --: | --: | --: |"]
    for key, _ in (*RULES, *GUARDED):
        gains = [cell.ahead(key) for cell in cells]
        ahead = sum(cell.scores[PLANNER].good > cell.scores[key].good for cell in cells)
        least, median = min(gains), statistics.median(gains)
        lines.append(f"| {key} | {least:.2f} | {median:.2f} | {ahead} of {len(cells)} |")
    return [*lines, ""]


def _table(cells: Sequence[Cell]) -> list[str]:
    names = [PLANNER, *(name for _, name in RULES), *(f"{name} + 429" for _, name in GUARDED)]
    lines = [
        f"| trace | mix | requests/s | {' | '.join(names)} |",
        f"| --- | --- | --: | {' | '.join('--:' for _ in names)} |",
    ]
    for cell in cells:
        keys = [PLANNER, *(key for key, _ in RULES), *(key for key, _ in GUARDED)]
        shares = " | ".join(f"{100 * cell.scores[key].share:.1f} %" for key in keys)
        lines.append(f"| {cell.trace} {cell.timing.value} | {cell.mix} | {cell.rate_per_s:.1f} | {shares} |")
    return [*lines, ""]


def _accuracy(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "## Predictions",
        "",
        "The planner's, over all requests of a run, the first ones (from wrong defaults) included: the median of",
        "predicted over actual, and the median distance of a prediction from what happened.",
        "",
        "| trace | mix | refused | TTFT, median ratio | TTFT, error | ITL, median ratio | ITL, error |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for cell in cells:
        score = cell.scores[PLANNER]
        ttft, itl = score.ttft_errors, score.itl_errors
        lines.append(
            f"| {cell.trace} {cell.timing.value} | {cell.mix} | {100 * score.refused / score.requests:.1f} % "
            f"| {ttft[0]:.2f} | {100 * ttft[1]:.0f} % | {itl[0]:.2f} | {100 * itl[1]:.0f} % |"
        )
    return lines


def learning(learned: Sequence[Learned]) -> list[str]:
    """From constants that are all wrong."""
    lines = [
        "",
        "## From wrong constants",
        "",
        f"The first mix under the first trace's steady arrivals at {SHOWN_LOAD:g} of its bound, without admission;",
        "constants each three times too large (x3) or too small (/3): a step's base, a sequence, a token in the",
        "cache, a prompt token. Median prediction over median of what happened, of the first",
        f"{LEARNED_AFTER} requests and of those after them.",
        "",
        "| constants | TTFT, first | TTFT, after | ITL, first | ITL, after |",
        "| --- | --: | --: | --: | --: |",
    ]
    for each in learned:
        first, after = f"{each.first_ttft:.2f} | {each.ttft:.2f}", f"{each.first_itl:.2f} | {each.itl:.2f}"
        lines.append(f"| {each.wrong.name} | {first} | {after} |")
    return lines
