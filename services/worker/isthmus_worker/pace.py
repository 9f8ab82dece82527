"""What the relay is told of the engine, so that incoming KV never costs decode more than it can bear."""

from __future__ import annotations

from isthmus_shared.engines.port import Engine, EngineInfo, StepReport
from isthmus_worker.attachment import Attachment

ITL_SHARE = 0.2
"""Weight of the newest interval: five steps make a change felt, one odd step does not."""
ITL_RESET_S = 1.0
"""A longer gap between two decoding steps is a pause, not a latency."""


class Pace:
    """Reports steps, KV room and inter-token latency to the node's relay, when there is one."""

    def __init__(self, engine: Engine, attachment: Attachment, *, itl_target_s: float) -> None:
        """`itl_target_s`: 0 is no target, and then no latency is reported."""
        self._engine, self._attachment, self._itl_target_s = engine, attachment, itl_target_s
        self._decoded_s: float | None = None
        self._itl_s: float | None = None
        self._step_s: float | None = None

    def step(self, report: StepReport, info: EngineInfo, *, now_s: float) -> None:
        if not report.decode_sequences:
            return
        self._step_s = max(report.step_s, 1e-6)
        gap_s = None if self._decoded_s is None else now_s - self._decoded_s
        self._decoded_s = now_s
        if gap_s is None or gap_s > ITL_RESET_S:
            self._itl_s = None
        elif self._itl_s is None:
            self._itl_s = gap_s
        else:
            self._itl_s += ITL_SHARE * (gap_s - self._itl_s)
        self.room(info)
        link = self._attachment.link
        if link is not None and self._itl_target_s and self._itl_s:
            link.report_itl(self._itl_s * 1e3, self._itl_target_s * 1e3)

    def room(self, info: EngineInfo) -> None:
        """Also between steps: an engine that makes none has room all the same."""
        link = self._attachment.link
        if link is not None and self._step_s is not None and not link.lost.is_set():
            free = self._engine.load().kv_blocks_free
            link.report_step(step_s=self._step_s, kv_blocks_free=free, kv_block_tokens=info.kv_block_tokens)
