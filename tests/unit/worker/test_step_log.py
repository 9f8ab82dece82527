from __future__ import annotations

from isthmus_shared.engines.port import StepReport
from isthmus_shared.messages.health import MAX_STEP_SAMPLES, StepSample
from isthmus_worker.step_log import StepLog


def test_the_latest_steps_are_kept_and_all_are_counted() -> None:
    log = StepLog()
    for index in range(MAX_STEP_SAMPLES + 3):
        log.note(StepReport((), 0.01 * (index + 1), prefill_tokens=index, decode_sequences=2), kv_tokens=16 * index)
    assert log.total == MAX_STEP_SAMPLES + 3
    assert len(log.samples) == MAX_STEP_SAMPLES
    last = MAX_STEP_SAMPLES + 2
    assert log.samples[-1] == StepSample(
        step_s=0.01 * (last + 1), decode_sequences=2, prefill_tokens=last, kv_tokens=16 * last
    )
    assert log.samples[0].prefill_tokens == 3


def test_a_report_without_work_is_no_step() -> None:
    log = StepLog()
    log.note(StepReport((), 0.0, prefill_tokens=0, decode_sequences=0), 0)
    log.note(StepReport((), 0.01, prefill_tokens=0, decode_sequences=0), 0)
    log.note(StepReport((), 0.0, prefill_tokens=5, decode_sequences=1), 0)
    assert (log.total, log.samples) == (0, ())
