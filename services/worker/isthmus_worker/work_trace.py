"""One attempt's spans at one worker. The parts leave marks; each span is made when its part is over.

prefilled here   queue ─▶ prefill (an event per chunk), and within it stage: first byte of KV written to sealed
KV from afar     transfer: source opened to verified ─▶ commit: to in the engine's cache
then             decode: to the last token
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.engines.port import SequenceOutput
from isthmus_shared.errors import Fault, IsthmusError
from isthmus_shared.tracing import Tracing


class WorkTrace:
    def __init__(self, tracing: Tracing, parent: str, *, worker: str, request: str) -> None:
        self._tracing, self._parent = tracing, parent
        self._common = {"worker": worker, "request_id": request}
        self._admitted_s = self._submitted_s = tracing.now_s()
        self._decoding_s: float | None = None
        self._tokens = 0
        self._sink: TracedSink | None = None
        self._source: TracedSource | None = None

    def submitted(self) -> None:
        """The engine is about to get it: there is room in staging."""
        self._submitted_s = self._tracing.now_s()

    def sink(self, sink: KvSink) -> KvSink:
        """That sink, observed."""
        self._sink = TracedSink(sink, self._tracing)
        return self._sink

    def source(self, source: KvSource) -> KvSource:
        """That source, observed."""
        self._source = TracedSource(source, self._tracing)
        return self._source

    def output(self, output: SequenceOutput) -> None:
        """Call with each output of the sequence, in order."""
        now_s = self._tracing.now_s()
        code = "" if output.fault is None else output.fault.code
        if self._decoding_s is None:
            self._decoding_s = now_s
            if self._source is not None:
                self._crossed(self._source, now_s, code)
            else:
                self._prefilled(output, now_s, code)
        self._tokens += len(output.token_ids)
        if output.finish is not None and self._sink is None and not (code and not self._tokens):
            self._span("decode", self._parent, self._decoding_s, now_s, code, tokens=self._tokens)

    def failed(self, fault: Fault) -> None:
        """The worker ended it from its own side."""
        now_s = self._tracing.now_s()
        name = "decode" if self._decoding_s is not None else "transfer" if self._source is not None else "prefill"
        self._span(name, self._parent, self._decoding_s or self._admitted_s, now_s, fault.code)

    def _prefilled(self, output: SequenceOutput, now_s: float, code: str) -> None:
        times, begun_s = output.prefill, self._admitted_s
        if times is not None:
            begun_s = min(now_s, self._submitted_s + times.begun_s)
            self._span("queue", self._parent, self._admitted_s, begun_s, "")
        prefill = self._tracing.begin("prefill", self._parent, start_s=begun_s, **self._common)
        for tokens, done_s in times.chunks if times is not None else ():
            prefill.event("chunk", at_s=min(now_s, self._submitted_s + done_s), tokens=tokens)
        if self._sink is not None and self._sink.begun_s is not None:
            sealed_s = self._sink.sealed_s or now_s
            staged_bytes = self._sink.total_bytes
            self._span("stage", prefill.traceparent, self._sink.begun_s, sealed_s, code, bytes=staged_bytes)
        prefill.end(at_s=now_s, error=code)

    def _crossed(self, source: TracedSource, now_s: float, code: str) -> None:
        if source.ready_s is None:
            self._span("transfer", self._parent, source.opened_s, now_s, code)
            return
        self._span("transfer", self._parent, source.opened_s, source.ready_s, source.error, bytes=source.total_bytes)
        if not source.error:
            self._decoding_s = source.released_s or now_s
            self._span("commit", self._parent, source.ready_s, self._decoding_s, code)

    def _span(
        self, name: str, parent: str, start_s: float, end_s: float, error: str, **attributes: str | int | float
    ) -> None:
        span = self._tracing.begin(name, parent, start_s=start_s, **self._common, **attributes)
        span.end(at_s=max(start_s, end_s), error=error)


class TracedSink:
    """A sink that notes when it was first mapped and when it was sealed."""

    def __init__(self, inner: KvSink, tracing: Tracing) -> None:
        self._inner, self._tracing = inner, tracing
        self.begun_s: float | None = None
        self.sealed_s: float | None = None

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        if self.begun_s is None:
            self.begun_s = self._tracing.now_s()
        return self._inner.map(offset_bytes, size_bytes)

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        self._inner.filled(offset_bytes, size_bytes)

    def seal(self) -> None:
        self._inner.seal()
        self.sealed_s = self._tracing.now_s()

    def abort(self, fault: Fault) -> None:
        self._inner.abort(fault)


class TracedSource:
    """A source that notes when it was opened, ready and released."""

    def __init__(self, inner: KvSource, tracing: Tracing) -> None:
        self._inner, self._tracing = inner, tracing
        self.opened_s = tracing.now_s()
        self.ready_s: float | None = None
        self.released_s: float | None = None
        self.error = ""

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes

    async def ready(self) -> None:
        try:
            await self._inner.ready()
        except IsthmusError as error:
            self.error = error.code
            raise
        finally:
            self.ready_s = self._tracing.now_s()

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        return self._inner.map(offset_bytes, size_bytes)

    def release(self) -> None:
        if self.released_s is None:
            self.released_s = self._tracing.now_s()
        self._inner.release()
