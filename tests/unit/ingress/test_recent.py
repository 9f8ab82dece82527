from __future__ import annotations

import pytest

from isthmus_ingress.recent import KEPT, RecentLatencies


def test_nothing_is_told_before_there_is_something_to_compare() -> None:
    recent = RecentLatencies()
    assert recent.ttft is None
    assert recent.itl is None


def test_errors_are_paired_request_by_request() -> None:
    recent = RecentLatencies()
    for actual_s, predicted_s in ((1.0, 2.0), (2.0, 1.0), (4.0, 4.0)):
        recent.first_token(actual_s, predicted_s)
    told = recent.ttft
    assert told is not None
    assert (told.requests, told.actual_p50_s, told.predicted_p50_s) == (3, 2.0, 2.0)
    assert told.error == pytest.approx(0.5), "medians that agree do not hide that single predictions do not"
    assert recent.itl is None


def test_only_the_latest_count() -> None:
    recent = RecentLatencies()
    recent.inter_token(100.0, 1.0)
    for _ in range(KEPT):
        recent.inter_token(0.5, 0.25)
    told = recent.itl
    assert told is not None
    assert (told.requests, told.actual_p50_s, told.error) == (KEPT, 0.5, 0.5)
