"""A flow's end waits for whoever still touches its staging, and comes exactly once."""

from __future__ import annotations

import pytest

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.vllm.flows import FlowTable
from isthmus_shared.errors import Cancelled, ManifestMismatch, TransferFailed
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId
from isthmus_shared.kv.manifest import KvDtype, KvManifest
from isthmus_shared.kv.shape import KvShape, group_layers
from isthmus_shared.messages.work import KvTicket, RelayRef

GONE = Cancelled("the client left").to_fault()
NAME = TransferId("t")
FIRST = Generation(1)
SHAPE = KvShape(model_fingerprint="f", dtype=KvDtype.FP32, groups=group_layers([None], kv_heads=1, head_dim=2))
MANIFEST = SHAPE.manifest(4)
SOURCE = RelayRef(node_id=NodeId("n"), incarnation=Incarnation("i"), address="a")


class Ends:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def transfer() -> MemoryKvTransfer:
    return MemoryKvTransfer(MANIFEST.total_bytes)


def ticket(manifest: KvManifest = MANIFEST) -> KvTicket:
    return KvTicket(transfer_id=NAME, generation=FIRST, source=SOURCE, manifest=manifest)


def test_an_abort_waits_for_the_writer() -> None:
    inner, ends = transfer(), Ends()
    sink = FlowTable().put_sink(NAME, inner.sink, ends)
    sink.map(0, 8)
    sink.abort(GONE)
    assert not sink.ended
    assert inner.fault is None
    with pytest.raises(TransferFailed):
        sink.map(8, 8)
    sink.filled(0, 8)
    assert sink.ended
    assert inner.fault == GONE
    assert ends.count == 1


def test_an_idle_sink_is_aborted_at_once_and_once() -> None:
    inner, ends = transfer(), Ends()
    sink = FlowTable().put_sink(NAME, inner.sink, ends)
    sink.abort(GONE)
    sink.abort(TransferFailed("later").to_fault())
    assert sink.ended
    assert sink.fault == inner.fault == GONE
    assert ends.count == 1


def test_a_sealed_sink_is_not_aborted_any_more() -> None:
    inner, ends = transfer(), Ends()
    sink = FlowTable().put_sink(NAME, inner.sink, ends)
    sink.map(0, sink.total_bytes)
    sink.filled(0, sink.total_bytes)
    sink.seal()
    sink.abort(GONE)
    assert sink.sealed
    assert inner.sealed
    assert inner.fault is None
    assert ends.count == 1


def test_a_sink_that_cannot_be_sealed_has_failed() -> None:
    inner, ends = transfer(), Ends()
    sink = FlowTable().put_sink(NAME, inner.sink, ends)
    with pytest.raises(TransferFailed):
        sink.seal()
    assert sink.ended
    assert not sink.sealed
    assert sink.fault is not None


def test_a_sink_whose_relay_is_lost_ends_with_its_fault() -> None:
    inner, ends = transfer(), Ends()
    inner.fail_sink_at(8)
    sink = FlowTable().put_sink(NAME, inner.sink, ends)
    sink.map(0, 8)
    sink.filled(0, 8)
    with pytest.raises(TransferFailed):
        sink.map(8, 8)
    sink.abort(GONE)
    assert sink.ended
    assert sink.fault is not None
    assert sink.fault.why == "injected" or "lost" in sink.fault.what


async def test_a_flow_is_found_by_its_name_until_it_is_dropped() -> None:
    table, inner = FlowTable(), transfer()
    sink = table.put_sink(NAME, inner.sink, Ends())
    assert await table.open_sink(NAME, FIRST, MANIFEST, deadline_s=1, wait_s=1) is sink
    table.drop(NAME)
    assert len(table) == 0
    with pytest.raises(TransferFailed, match="not open"):
        await table.open_sink(NAME, FIRST, MANIFEST, deadline_s=1, wait_s=1)


async def test_a_flow_of_another_size_is_refused() -> None:
    table = FlowTable()
    table.put_source(NAME, transfer().source)
    with pytest.raises(ManifestMismatch):
        await table.open_source(ticket(SHAPE.manifest(5)), deadline_s=1)


async def test_a_source_is_released_once_and_not_read_after() -> None:
    table, inner = FlowTable(), transfer()
    inner.sink.filled(0, inner.total_bytes)
    inner.sink.seal()
    table.put_source(NAME, inner.source)
    source = await table.open_source(ticket(), deadline_s=1)
    await source.ready()
    assert sum(len(view) for view in source.map(0, 8)) == 8
    source.release()
    source.release()
    assert inner.released
    with pytest.raises(TransferFailed):
        source.map(0, 8)
