"""A train on one stream: the same bytes and the same verdicts whether compiled loops move it or Python does."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numba
import pytest
import structlog
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import LogCapture

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.compiled.trains import PIECE_BYTES
from isthmus_kvrelay.transports.stream import PlainStream
from isthmus_kvrelay.wire import CHECKSUM_BYTES, MAX_TRAIN_CHUNKS

SILENT = structlog.wrap_logger(structlog.PrintLogger(), processors=[LogCapture()])
HEAD = b"head of a train"


@pytest.fixture(scope="module")
def loading() -> Loading:
    loading = Loading(SILENT)
    loading.start()
    loading.wait()
    assert loading.loops is not None, "numba is among the development tools: its loops must be there"
    return loading


class Ends:
    """Two streams that are connected; which of them has compiled loops is the test's to say."""

    def __init__(self, sender: Loading | None, receiver: Loading | None) -> None:
        ours, theirs = socket.socketpair()
        self.sender, self.receiver = PlainStream(ours, sender), PlainStream(theirs, receiver)

    def close(self) -> None:
        for stream in (self.sender, self.receiver):
            stream.shut()
            stream.close()

    def send(self, payloads: Sequence[bytes], seeds: Sequence[int] | None) -> threading.Thread:
        views = [memoryview(bytearray(payload)) for payload in payloads]
        thread = threading.Thread(target=self.sender.send_train, args=(HEAD, views, seeds))
        thread.start()
        return thread


BOTH_WAYS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(params=BOTH_WAYS, ids=lambda ways: "-".join("compiled" if way else "python" for way in ways))
def ends(request: pytest.FixtureRequest, loading: Loading) -> Iterator[Ends]:
    sender, receiver = request.param
    found = Ends(loading if sender else None, loading if receiver else None)
    yield found
    found.close()


def take(ends: Ends, sizes: Sequence[int], seeds: Sequence[int] | None) -> tuple[list[bytes], list[bool] | None]:
    head = memoryview(bytearray(len(HEAD)))
    assert ends.receiver.receive([head])
    assert head == HEAD
    views = [memoryview(bytearray(size)) for size in sizes]
    intact = ends.receiver.receive_train(views, seeds)
    return [bytes(view) for view in views], intact


seeds_64 = st.integers(0, 2**64 - 1)
some_bytes = st.binary(min_size=1, max_size=3000)
cut_pieces = st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 77]).map(
    lambda size: bytes(range(1, 252)) * (size // 251) + bytes(size % 251)
)
trains = st.lists(st.tuples(some_bytes, seeds_64), min_size=1, max_size=MAX_TRAIN_CHUNKS) | st.lists(
    st.tuples(cut_pieces, seeds_64), min_size=1, max_size=2
)


@settings(max_examples=25, deadline=None)
@given(train=trains)
@pytest.mark.parametrize("ways", BOTH_WAYS)
def test_a_train_arrives_whole_whoever_moves_it(
    loading: Loading, ways: tuple[bool, bool], train: list[tuple[bytes, int]]
) -> None:
    payloads, seeds = [each[0] for each in train], [each[1] for each in train]
    ends = Ends(*(loading if way else None for way in ways))
    try:
        thread = ends.send(payloads, seeds)
        assert take(ends, [len(each) for each in payloads], seeds) == (payloads, [True] * len(train))
        thread.join()
    finally:
        ends.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_bytes_of_a_train(loading: Loading, compiled: bool) -> None:
    ends = Ends(loading if compiled else None, None)
    ends.sender.send_train(HEAD, [memoryview(b"first"), memoryview(b"second")], [7, 2**64 - 1])
    sums = [xxhash.xxh3_64_intdigest(b"first", seed=7), xxhash.xxh3_64_intdigest(b"second", seed=2**64 - 1)]
    told = bytearray(len(HEAD) + 11 + 2 * CHECKSUM_BYTES)
    assert ends.receiver.receive([memoryview(told)])
    assert told == HEAD + b"first" + b"second" + struct.pack("!QQ", *sums)
    ends.close()


def test_a_checksum_that_does_not_match_is_seen_for_its_own_payload(ends: Ends) -> None:
    thread = ends.send([b"a" * 300, b"b" * 300, b"c" * 300], [1, 2, 3])
    assert take(ends, [300, 300, 300], [1, 9, 3])[1] == [True, False, True]
    thread.join()


def test_without_seeds_nothing_is_checked_and_zeros_are_sent(ends: Ends) -> None:
    thread = ends.send([b"a" * 300], None)
    assert take(ends, [300], None)[1] == [True]
    thread.join()
    thread = ends.send([b"a" * 300], [1])  # what was sent before must not be left in it
    assert take(ends, [300], [1])[1] == [True]
    thread.join()
    thread = ends.send([b"a" * 300], None)
    assert take(ends, [300], [1])[1] == [False]
    thread.join()


@pytest.mark.parametrize("kept", [0, 100, 200, 203])
def test_a_peer_that_closes_within_a_train_is_told_from_a_damaged_one(ends: Ends, kept: int) -> None:
    ends.sender.send([memoryview(HEAD + bytes(kept))])
    ends.sender.shut()
    assert take(ends, [200], [1])[1] is None


def test_sending_to_a_peer_that_is_gone_is_an_os_error(ends: Ends) -> None:
    ends.receiver.shut()
    ends.receiver.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        ends.sender.send_train(HEAD, [memoryview(bytes(300))], [1])


def test_a_thread_that_waits_for_a_train_is_let_go_when_the_stream_is_shut(ends: Ends) -> None:
    found: list[list[bool] | None] = []
    ends.sender.send([memoryview(bytes(100))])
    thread = threading.Thread(
        target=lambda: found.append(ends.receiver.receive_train([memoryview(bytearray(200))], [1]))
    )
    thread.start()
    ends.receiver.shut()
    thread.join()
    assert found == [None]


@pytest.mark.parametrize("missing", ["numba.core.errors", "llvmlite.binding"])
def test_without_numba_python_does_it_and_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    seen = LogCapture()
    monkeypatch.setitem(sys.modules, missing, None)
    loading = Loading(structlog.wrap_logger(structlog.PrintLogger(), processors=[seen]))
    loading.start()
    loading.start()
    loading.wait()
    assert [entry["event"] for entry in seen.entries] == ["relay.without_compiled_loops"]
    assert missing in seen.entries[0]["why"]
    ends = Ends(loading, loading)
    thread = ends.send([b"bytes"], [5])
    assert take(ends, [5], [5]) == ([b"bytes"], [True])
    thread.join()
    ends.close()


def test_where_numba_may_not_compile_python_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = LogCapture()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    loading = Loading(structlog.wrap_logger(structlog.PrintLogger(), processors=[seen]))
    loading.start()
    loading.wait()
    assert loading.loops is None
    assert "NUMBA_DISABLE_JIT" in seen.entries[0]["why"]


def test_loops_that_were_kept_and_are_damaged_are_compiled_anew(tmp_path: Path) -> None:
    load = "from isthmus_kvrelay.compiled.load import load_loops; assert load_loops().send_train"
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", load], env=environ, check=True, timeout=300)
        indices = sorted(tmp_path.rglob("*.nbi"))
        assert indices
        for index in indices:
            index.write_bytes(index.read_bytes()[:9])
