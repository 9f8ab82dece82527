from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from isthmus_shared.metrics import Metrics


def test_every_metric_is_ours_has_a_help_text_and_a_unit_that_prometheus_knows() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    families = list(registry.collect())
    assert len(families) > 40
    for family in families:
        assert re.fullmatch(r"isthmus_[a-z_0-9]+", family.name), family.name
        assert family.documentation
        assert not family.name.endswith(("_ms", "_us", "_mb", "_s")), "base units only: seconds, bytes"


def test_two_processes_in_one_interpreter_do_not_share_counts() -> None:
    one, two = Metrics(), Metrics()
    one.generation_tokens.inc(3)
    assert b"isthmus_generation_tokens_total 3.0" in one.exposition()
    assert b"isthmus_generation_tokens_total 0.0" in two.exposition()


VLLM_REQUEST_METRICS = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prompt_tokens": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
}
"""vLLM's own names after `vllm:`, types and labels beside `model_name` and `engine` (`tests/vllm` asks vLLM itself)."""


def test_what_vllm_measures_too_has_its_name_type_and_labels() -> None:
    ours = {
        family.name.removeprefix("isthmus_"): (family.type, instrument._labelnames)
        for instrument in vars(Metrics()).values()
        if hasattr(instrument, "describe")
        for family in instrument.describe()
    }
    assert {name: ours.get(name) for name in VLLM_REQUEST_METRICS} == VLLM_REQUEST_METRICS


def test_every_way_in_which_a_choice_may_end_is_there_before_the_first_has() -> None:
    page = Metrics().exposition().decode()
    for reason in ("stop", "length", "abort", "error"):
        assert f'isthmus_request_success_total{{finished_reason="{reason}"}} 0.0' in page
