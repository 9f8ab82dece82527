"""Errors as tables, in Markdown, and predictions row by row as CSV. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np

from isthmus_planner.cost.calibration.evaluation import Errors, pooled, together
from isthmus_planner.cost.calibration.groups import QUANTITIES, Group, GroupKey
from isthmus_planner.cost.constants import Constants

COLUMNS: Mapping[str, str] = {
    "decode": "decode ITL",
    "tpot": "TPOT",
    "ttft": "TTFT",
    "e2el": "E2EL",
    "throughput": "throughput, steady runs",
    "throughput_all": "all runs",
    "throughput_stall": "all runs, stall given",
}


def error_table(errors: Mapping[GroupKey, Errors], *, groups: bool = False) -> str:
    """Mean relative errors per pair of accelerator and model, or per group; in percent."""
    named = {str(key): each for key, each in errors.items()} if groups else pooled(errors)
    lines = [_row(["", "judged", *COLUMNS.values()]), _row(["---", *["--:"] * (len(COLUMNS) + 1)])]
    lines += [_row(_cells(name, each)) for name, each in named.items()]
    if len(named) > 1:
        lines.append(_row(_cells("all", together(named.values()))))
    return "\n".join(lines)


def constants_table(constants: Mapping[GroupKey, Constants]) -> str:
    head = ["", "τ_L µs", "η_w", "η_kv", "σ µs", "s", "η_p", "t0 ms", "rep µs", "interference", "admission steps"]
    lines = [_row(head), _row(["---", *["--:"] * (len(head) - 1)])]
    for key, each in constants.items():
        values = (
            each.layer_s * 1e6,
            each.weight_efficiency,
            each.kv_efficiency,
            each.sequence_s * 1e6,
            each.skew,
            each.prefill_efficiency,
            each.prefill_base_s * 1e3,
            each.prefill_token_s * 1e6,
            each.interference,
            each.admission_steps,
        )
        lines.append(_row([str(key), *(f"{value:.3g}" for value in values)]))
    return "\n".join(lines)


def predictions_csv(
    groups: Mapping[GroupKey, Group], constants: Mapping[GroupKey, Constants], beyond: Mapping[int, str]
) -> str:
    """One line per measurement, in the file's order: measured, predicted p50 and p90, and what was extrapolated."""
    head = ["line", "group", "accelerators", "concurrency", "isl_tokens", "osl_tokens"]
    for name in QUANTITIES:
        unit = "tok_per_s" if name == "throughput" else "s"
        head += [f"{name}_measured_{unit}", f"{name}_p50_{unit}", f"{name}_p90_{unit}"]
    rows: list[tuple[int, Sequence[object]]] = []
    for key, group in groups.items():
        each = constants[key]
        predicted = group.predict(each)
        for index, row in enumerate(group.rows):
            cells: list[object] = [row.line, str(key), row.layout.accelerators, f"{row.concurrency:g}"]
            cells += [f"{row.isl_tokens:g}", f"{row.osl_tokens:g}"]
            for name in QUANTITIES:
                measured = (group.raw_throughput if name == "throughput" else group.observed[name])[index]
                p50, ratio = predicted[name][index], each.spread_of(name)
                p90 = p50 / ratio if name == "throughput" else p50 * ratio
                cells += ["" if np.isnan(measured) else f"{measured:.5g}", f"{p50:.5g}", f"{p90:.5g}"]
            rows.append((row.line, [*cells, each.calibrated and row.line not in beyond, beyond.get(row.line, "")]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "calibrated", "extrapolated"])
    writer.writerows(cells for _, cells in sorted(rows, key=lambda each: each[0]))
    return text.getvalue()


def _cells(name: str, errors: Errors) -> list[str]:
    judged = max((len(values) for values in errors.values.values()), default=0)
    shown = [f"{100 * errors.mean(column):.1f} %" if errors.values.get(column) else "–" for column in COLUMNS]
    return [name, str(judged), *shown]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
