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
    one.tokens_out.inc(3)
    assert b"isthmus_tokens_out_total 3.0" in one.exposition()
    assert b"isthmus_tokens_out_total 0.0" in two.exposition()
