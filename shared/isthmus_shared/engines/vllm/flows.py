"""Sinks and sources on their way from the worker to the connector inside vLLM. Knows nothing of vLLM.

The worker opens both ends at its relay and hands them to the engine (see `engines.port`); vLLM's scheduler passes on
only what fits into a request's parameters. So the engine puts them here under a name, and the connector takes them
out by it.

vLLM ends a request whenever it likes, while the connector's threads may still write. The sink therefore puts its end
off until nobody touches the staging memory any more: the relay gives it to others right after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Fault, IsthmusError, ManifestMismatch, TransferFailed
from isthmus_shared.ids import Generation, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import KvTicket

End = TypeVar("End", KvSink, KvSource)

Notify = Callable[[], None]


class FlowTable:
    """The flows of one engine, by transfer id; to the connector it is a relay that has them all open already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[str, HeldSink] = {}
        self._sources: dict[str, HeldSource] = {}

    # -- the engine's side

    def put_sink(self, transfer_id: str, sink: KvSink, changed: Notify) -> HeldSink:
        """`changed` is called, from any thread, once the flow has ended."""
        with self._lock:
            assert transfer_id not in self._sinks, f"flow {transfer_id} twice"
            held = self._sinks[transfer_id] = HeldSink(sink, changed)
        return held

    def put_source(self, transfer_id: str, source: KvSource) -> HeldSource:
        """`source` is ready."""
        with self._lock:
            assert transfer_id not in self._sources, f"flow {transfer_id} twice"
            held = self._sources[transfer_id] = HeldSource(source)
        return held

    def drop(self, transfer_id: str) -> None:
        with self._lock:
            self._sinks.pop(transfer_id, None)
            self._sources.pop(transfer_id, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._sinks) + len(self._sources)

    # -- the connector's side, as of a relay's client

    async def open_sink(
        self, transfer_id: TransferId, generation: Generation, manifest: KvManifest, *, deadline_s: float, wait_s: float
    ) -> KvSink:
        """Raises `TransferFailed` when its request is over, `ManifestMismatch` when it is of another size."""
        with self._lock:
            sink = self._sinks.get(transfer_id)
        return self._require(sink, transfer_id, manifest.total_bytes)

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource:
        with self._lock:
            source = self._sources.get(ticket.transfer_id)
        return self._require(source, ticket.transfer_id, ticket.manifest.total_bytes)

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        with self._lock:
            sink, source = self._sinks.get(transfer_id), self._sources.get(transfer_id)
        if sink is not None:
            sink.abort(fault)
        if source is not None:
            source.release()

    @staticmethod
    def _require(end: End | None, transfer_id: str, total_bytes: int) -> End:
        if end is None:
            raise TransferFailed(f"transfer {transfer_id} is not open", why="its request is over")
        if end.total_bytes != total_bytes:
            raise ManifestMismatch(
                "the transfer's size is not what the connector carries",
                why=f"here {total_bytes} bytes, there {end.total_bytes}",
                param="total_bytes",
            )
        return end


class HeldSink:
    """A sink whose end waits for its writers."""

    def __init__(self, sink: KvSink, changed: Notify) -> None:
        """`changed` is called from any thread once the flow has ended, well or not."""
        self._sink, self._changed = sink, changed
        self._lock = threading.Lock()
        self._writing_bytes = 0
        self._fault: Fault | None = None
        self._ended = False
        self.sealed = False

    @property
    def total_bytes(self) -> int:
        return self._sink.total_bytes

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @property
    def ended(self) -> bool:
        """Sealed or aborted: nothing will be written any more."""
        return self._ended

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        with self._lock:
            if self._fault is not None:
                raise TransferFailed("the transfer has ended", why=self._fault.what)
            try:
                views = self._sink.map(offset_bytes, size_bytes)
            except IsthmusError as error:
                self._fault = error.to_fault()
                raise
            self._writing_bytes += size_bytes
            return views

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        with self._lock:
            self._writing_bytes -= size_bytes
            if self._fault is None:
                try:
                    self._sink.filled(offset_bytes, size_bytes)
                except IsthmusError as error:
                    self._fault = error.to_fault()
            last = self._end_if_quiet()
        if last:
            self._changed()

    def seal(self) -> None:
        """Raises what the sink raises; the flow has then failed."""
        with self._lock:
            if self._ended:
                return
            if self._fault is not None:
                raise self._fault.to_error()
            try:
                self._sink.seal()
            except IsthmusError as error:
                self._fault = error.to_fault()
                self._end_if_quiet()
                raise
            else:
                self.sealed = self._ended = True
            finally:
                self._changed()

    def abort(self, fault: Fault) -> None:
        with self._lock:
            if self._ended:
                return
            self._fault = self._fault or fault
            last = self._end_if_quiet()
        if last:
            self._changed()

    def _end_if_quiet(self) -> bool:
        if self._fault is None or self._ended or self._writing_bytes > 0:
            return False
        self._ended = True
        self._sink.abort(self._fault)
        return True


class HeldSource:
    """A source that is ready, and is released once, whoever is first."""

    def __init__(self, source: KvSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.released = False

    @property
    def total_bytes(self) -> int:
        return self._source.total_bytes

    async def ready(self) -> None:
        """The engine has waited for it, on its own loop."""

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        with self._lock:
            if self.released:
                raise TransferFailed("the transfer was released")
            return self._source.map(offset_bytes, size_bytes)

    def release(self) -> None:
        """By the connector, once it has copied or gives up; by the engine, once vLLM has let go of the request."""
        with self._lock:
            if not self.released:
                self.released = True
                self._source.release()
