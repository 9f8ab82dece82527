"""Our metrics' names beside those in the vLLM that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from isthmus_shared.metrics import Metrics

OURS_ALONE = ("isthmus_request_predicted_ttft_seconds", "isthmus_requests", "isthmus_requests_in_flight")


def test_request_metrics_have_the_names_of_this_vllm() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = (Path(vllm.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    shared = [
        family.name
        for family in Metrics().registry.collect()
        if family.name.startswith(
            ("isthmus_request_", "isthmus_num_requests", "isthmus_prompt", "isthmus_generation", "isthmus_kv_cache")
        )
        or family.name.endswith(("first_token_seconds", "inter_token_latency_seconds", "request_latency_seconds"))
    ]
    names = [name for name in shared if name not in OURS_ALONE]
    assert len(names) >= 12
    assert [name for name in names if f'"vllm:{name.removeprefix("isthmus_")}"' not in source] == []
