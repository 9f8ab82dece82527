"""What the connector reports to vLLM, and when."""

from __future__ import annotations

from isthmus_kvrelay.client.vllm.stats import TransferStats, empty_report, merged, percentile, summary


def test_a_transfer_that_ended_is_reported_at_once() -> None:
    stats = TransferStats(scheduler=False)
    assert stats.take() is None
    stats.loaded(1 << 20, 0.25)
    stats.load_failed()
    report = stats.take()
    assert report is not None
    assert (report["loaded"], report["loaded_bytes"], report["loads_failed"]) == (1, 1 << 20, 1)
    assert stats.take() is None
    assert stats.totals == {"loaded": 1, "loads_failed": 1}


def test_hook_times_are_those_of_steps_with_transfers() -> None:
    stats = TransferStats(scheduler=True)
    for busy in (False, True, True):
        with stats.hook():
            pass
        with stats.hook():
            pass
        stats.step_over(busy=busy)
    stats.saved(1)
    report = stats.take()
    assert report is not None
    assert len(report["scheduler_hook_us"]) == 2
    assert all(value > 0 for value in report["scheduler_hook_us"])
    assert report["worker_hook_us"] == []


def test_reports_of_ranks_add_up() -> None:
    one, other = empty_report(), empty_report()
    one["saved"], other["saved"] = 1, 2
    one["load_s"], other["load_s"] = [0.1], [0.3]
    both = merged(one, other)
    assert both["saved"] == 3
    assert both["load_s"] == [0.1, 0.3]
    assert summary(both)["p50 load (ms)"] == 300.0


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(101)], 0.99) == 99.0
