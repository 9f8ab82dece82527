"""Bytes into a sink's views and out of a source's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.kv.canonical import Span

Bytes = npt.NDArray[np.uint8]


def write_span(sink: KvSink, span: Span, data: Bytes) -> None:
    """Copy `data` (uint8, [span.size_bytes]) to that place and declare it filled. Raises what the sink raises."""
    assert data.nbytes == span.size_bytes, f"{data.nbytes} bytes for a span of {span.size_bytes}"
    at = 0
    for view in sink.map(span.offset_bytes, span.size_bytes):
        target = np.frombuffer(view, dtype=np.uint8)
        target[:] = data[at : at + len(target)]
        at += len(target)
    assert at == span.size_bytes, "the sink mapped less than was asked"
    sink.filled(span.offset_bytes, span.size_bytes)


def read_span(source: KvSource, span: Span) -> Bytes:
    """A writable copy (uint8, [span.size_bytes]) of that place."""
    data = np.empty(span.size_bytes, dtype=np.uint8)
    at = 0
    for view in source.map(span.offset_bytes, span.size_bytes):
        data[at : at + len(view)] = np.frombuffer(view, dtype=np.uint8)
        at += len(view)
    assert at == span.size_bytes, "the source mapped less than was asked"
    return data
