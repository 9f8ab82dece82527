"""What each command's --json prints. `tools/gen_cli_docs.py` shows it; tests hold it against what is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    form: str
    """One object, a list of objects, or one object a line."""
    fields: Mapping[str, str]
    """Name (with `?` where it may be missing) → meaning."""

    def problems(self, given: Mapping[str, object]) -> list[str]:
        """How one object differs from what is documented."""
        known = {name.rstrip("?") for name in self.fields}
        missing = {name for name in self.fields if not name.endswith("?")} - set(given)
        return [f"{name} is missing" for name in sorted(missing)] + [
            f"{name} is not documented" for name in sorted(set(given) - known)
        ]


LINES, LIST, OBJECT = "one object a line", "a list of objects", "one object"
_STATUS = {
    "view": "what the planner knows: [ClusterView](../schemas/cluster_view.json); null while nothing was heard",
    "cluster?": "from the state folder: model, addresses, processes with pid, restarts and log; not with --bus-url",
}

SHAPES: Mapping[str, Shape] = {
    "up": Shape(
        LINES,
        {
            "event": "`model.making`, `process.started`, `process.ready`, `process.ended`, `process.killed`, `ready`, "
            "`stopping`, `failed`, `stopped`",
            "text": "the same as a sentence",
            "name?": "of the process",
            "kind?": "`nats`, `planner`, `relay`, `worker`, `ingress`",
            "pid?": "of the process, or with `ready` of the supervisor; null when it ended",
            "log?": "its file",
            "http_url?": "with `ready`",
            "bus_url?": "with `ready`: without user and password",
            "model?": "with `ready`: its name for clients",
            "code?": "with `failed`: the error's",
        },
    ),
    "status": Shape(OBJECT, _STATUS),
    "status --watch": Shape(
        LINES,
        {
            "at": "wall clock, ISO 8601, UTC",
            "problem": "why the view is not of now; null when it is",
            "age_s": "of the view, seconds",
            **_STATUS,
        },
    ),
    "explain": Shape(
        OBJECT,
        {
            "explanations": "one for each time that the request was routed, oldest first: the `explanations` of "
            "[ExplainReply](../schemas/explain_reply.json)",
        },
    ),
    "chat": Shape(
        LINES,
        {
            "model": "that was asked",
            "content": "the answer",
            "finish_reason": "`stop` or `length`",
            "usage": "`prompt_tokens`, `completion_tokens`, `total_tokens`, as the OpenAI API has them",
        },
    ),
    "down": Shape(
        OBJECT,
        {"stopped": "true", "supervisor_pid": "of the `isthmus up` that ended", "logs": "the folder that is left"},
    ),
    "doctor": Shape(
        LIST,
        {
            "check": "what was looked at",
            "grade": "`ok`, `warning`, `error`",
            "what": "what was found",
            "mend": "the command or setting that mends it; empty when there is nothing to mend",
        },
    ),
    "bench relay": Shape(
        OBJECT,
        {
            "machine": "CPUs, kernel, Python, load",
            "transfers": "by contender: every round's series (GB/s, latencies, CPU) by workload",
            "hand_overs": "within a node: bytes, p50 and p99 in seconds",
            "paced": "rates asked for and measured, bytes per second",
            "bursts": "how evenly a paced lane sends",
        },
    ),
    "bench load": Shape(
        OBJECT,
        {
            "url": "as it was given",
            "load": "clients, rate or trace, in words",
            "seconds": "measured",
            "requests": "that ended within them",
            "answered": "of those: whole, without an error",
            "errors": "kind → count: `http_<status>_<code>`, an error event's code, `cut_short`, `no_tokens`, "
            "`timeout`, `connection_refused`, `connection_reset`, `connection_closed`, `connection_failed`, "
            "`not_http`, `too_many`",
            "requests_per_s": "answered ones",
            "output_tokens": "as the server counts them, where it tells its usage",
            "output_tokens_per_s": "of answered requests",
            "prompt_tokens": "as the server counts them",
            "targets": "`ttft_s` and `itl_s`; null where none was given",
            "good_requests": "within the targets",
            "goodput_requests_per_s": "of those",
            "ttft_s": "count, mean, min, p50 … p99.9, max, and buckets as [upper bound, count]; null of nothing",
            "itl_s": "the same, of waits between two tokens",
            "e2e_s": "the same, of whole answers",
        },
    ),
    "calibrate": Shape(
        OBJECT,
        {
            "measurements": "that were used",
            "groups": "accelerator, model, engine, precision, kind of layout",
            "left_out": "reason → count",
            "judged": "what the errors are of",
            "beyond_measured": "with --fit none: measurements beyond what the constants were measured on",
            "errors": "accelerator and model → quantity → mean relative error",
            "errors_by_group": "the same by group",
        },
    ),
    "plan": Shape(
        OBJECT,
        {
            "format": "`isthmus-plan/1`; the same bytes for the same inputs and seed",
            "seed": "of the simulations",
            "model": "its name",
            "objective": "`throughput`, `price` or `both`",
            "wanted_requests_per_s": "the workload's; null where it names none",
            "targets": "`ttft_s` and `itl_s`, seconds; null where there is none",
            "mix": "mean lengths, of all requests and of each kind",
            "verdict": "one sentence",
            "reasons": "sentences",
            "recommended": "the plan: servers by role, p50 and p90 of its figures, what the simulator found",
            "aggregated": "the best without a crossing; null where there is none",
            "disaggregated": "the best in which every request crosses; null where there is none",
            "fractional": "the optimum with servers divided between roles",
            "pareto": "plans from cheap to fast; empty where a price is unknown",
            "one_more": "what one more server of each type would bring",
            "settings": "of decode replicas that receive KV; null where nothing crosses",
            "node_types": "each type in each role: layout, constants and where they are from",
        },
    ),
    "reproduce": Shape(
        OBJECT,
        {
            "format": "`isthmus-reproduce/1`; the same bytes for the same seed",
            "seed": "of the simulations",
            "holds": "whether every statement is met",
            "caution": "what a fit is worth",
            "cross_vendor": "cells, checks, ablations, fitted constants",
            "deepseek": "checks, fitted and assumed constants",
        },
    ),
    "nats-config": Shape(
        OBJECT,
        {
            "config": "the server's file",
            "users": "name, file of the URL, file of the nkey (null with passwords); a process is given these files",
        },
    ),
    "sim": Shape(
        OBJECT,
        {
            "seeds": "how many were run",
            "failures": "of each that failed: `seed`, `problems`, `schedule` (the smallest that still fails)",
            "trace?": "with --seed or --schedule: line by line",
        },
    ),
}
