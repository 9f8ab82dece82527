"""Traces are read as their formats say, a part at a time, and a bad line is named."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus_planner.sim import traces
from isthmus_planner.sim.hardware import DecodeTable, Node, PrefillTable, Role, ScenarioError
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.traces import TraceError, read_azure, read_mooncake, read_trace
from isthmus_planner.sim.workload import FromTrace, Stream

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]
"""The first simulation in a checkout compiles for some twenty CPU seconds, which one process does for all."""

GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(**changed: object) -> str:
    return json.dumps(GOOD | changed) + "\n"


def test_mooncake_lines_become_requests_from_the_first_ones_time_on() -> None:
    (batch,) = read_mooncake([mooncake(), "\n", mooncake(timestamp=30000, hash_ids=[]), mooncake(timestamp=30000)])
    assert batch.at_s.tolist() == pytest.approx([0.0, 2.518, 2.518])
    assert batch.isl_tokens.tolist() == [6955] * 3
    assert batch.osl_tokens.tolist() == [52] * 3
    assert batch.block_end.tolist() == [3, 3, 6]
    assert batch.blocks.tolist() == [46, 47, 48] * 2


@pytest.mark.parametrize(
    "times",
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690"),
        ("2024-05-10 00:00:00.680590+00:00", "2024-05-10 00:00:04.995169+00:00"),
    ],
)
def test_azure_lines_of_both_years_become_requests(times: tuple[str, str]) -> None:
    (batch,) = read_azure([AZURE, f"{times[0]},374,44\n", f"{times[1]},4808,10"])
    assert batch.at_s.tolist() == pytest.approx([0.0, 4.314579], abs=1e-9)
    assert batch.isl_tokens.tolist() == [374, 4808]
    assert batch.osl_tokens.tolist() == [44, 10]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{not json\n", "no JSON"),
        ("[1, 2]\n", "no JSON object"),
        (mooncake(timestamp="soon"), "`timestamp` is 'soon'"),
        (mooncake(timestamp=float("nan")), "`timestamp` is nan"),
        (mooncake(timestamp=True), "`timestamp` is True"),
        (mooncake(timestamp=1), "sort the trace"),
        (mooncake(input_length=0), "an input of 0 tokens"),
        (mooncake(output_length=-5), "an output of -5 tokens"),
        (mooncake(input_length=10**30), "an input of 1000"),
        (mooncake(input_length=1.5), "`input_length` is 1.5"),
        (mooncake(hash_ids=["a"]), "`hash_ids`"),
        (mooncake(hash_ids=[2**70]), "`hash_ids`"),
        (mooncake(hash_ids=None), "`hash_ids`"),
    ],
)
def test_a_bad_line_of_mooncakes_is_named_by_its_number(bad: str, said: str) -> None:
    with pytest.raises(TraceError, match="trace, line 4: ") as caught:
        list(read_mooncake([mooncake(), mooncake(), "\n", bad, mooncake()]))
    assert said in str(caught.value)
    assert caught.value.line == 4


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("yesterday,1,1\n", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:47,1\n", "2 columns"),
        ("2023-11-16 18:15:47,1.5,1\n", "'1.5' is no number of tokens"),
        ("2023-11-16 18:15:47,,1\n", "'' is no number"),
        ("2023-11-16 18:15:47,1,0\n", "an output of 0 tokens"),
        ("2023-11-16 18:15:47,999999999999999999999999999999,1\n", "an input of 9999"),
        ("2023-11-16 18:15:45,1,1\n", "sort the trace"),
        ("2023-11-16 18:15:47+00:00,1,1\n", "time zone"),
        ('2023-11-16 18:15:47,"1"x,1\n', "no CSV"),
    ],
)
def test_a_bad_line_of_azures_is_named_by_its_number(bad: str, said: str) -> None:
    with pytest.raises(TraceError, match="trace, line 3: ") as caught:
        list(read_azure([AZURE, "2023-11-16 18:15:46,3,4\n", bad]))
    assert said in str(caught.value)


@pytest.mark.parametrize("header", ["", "TIMESTAMP,ContextTokens\n", "a,b,c\n"])
def test_an_azure_file_without_its_columns_is_refused(header: str) -> None:
    with pytest.raises(TraceError, match="line 1: no column"):
        list(read_azure([header] if header else []))


def test_files_are_told_apart_by_their_ending(tmp_path: Path) -> None:
    for name, text in {"a.jsonl": mooncake(), "b.csv": AZURE + "2023-11-16 18:15:46.5,6955,52\n"}.items():
        (tmp_path / name).write_text(text)
        (batch,) = read_trace(tmp_path / name)
        assert batch.isl_tokens.tolist() == [6955]


@pytest.mark.parametrize(
    ("name", "said"), [("x.parquet", "neither"), ("none.csv", "cannot be read"), ("b.csv", "UTF-8")]
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match=said):
        list(read_trace(tmp_path / name))


def test_memory_does_not_grow_with_the_traces_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "BATCH_REQUESTS", 500)
    node = Node("a0", Role.AGGREGATED, 10**6, PrefillTable(0.001, 1e-7), DecodeTable((0.001,) * 64, 1e-10))

    def lines(count: int) -> Iterator[str]:
        for number in range(count):
            yield f'{{"timestamp": {number * 200}, "input_length": 900, "output_length": 9, "hash_ids": [{number}, 7]}}'

    def peak(count: int) -> int:
        scenario = Scenario((node,), (Stream(FromTrace(), count, queue_limit=64),))
        tracemalloc.start()
        result = simulate(scenario, read_mooncake(lines(count)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert result.stream.completed == count
        return most

    peak(600)
    short, long = peak(2_000), peak(20_000)
    assert long < 1.2 * short


def test_only_as_much_of_a_trace_is_read_as_is_asked_for() -> None:
    node = Node("a0", Role.AGGREGATED, 10**6, PrefillTable(0.001, 1e-7), DecodeTable((0.001,) * 64, 1e-10))
    endless = (mooncake(timestamp=number) for number in itertools.count())
    assert simulate(Scenario((node,), (Stream(FromTrace(), 20_000),)), read_mooncake(endless)).stream.sent == 20_000


def test_a_trace_of_requests_that_fit_nowhere_is_an_error() -> None:
    node = Node("a0", Role.AGGREGATED, 100, PrefillTable(0.001, 1e-7), DecodeTable((0.001,), 1e-10))
    with pytest.raises(ScenarioError, match="none of the 2 requests"):
        simulate(Scenario((node,), (Stream(FromTrace(), 5),)), read_mooncake([mooncake(), mooncake()]))


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_text('\ufeff{"timestamp": 0, "input_length": 7, "output_length": 5}\r\n', encoding="utf-8")
    assert [batch.isl_tokens.tolist() for batch in read_trace(path)] == [[7]]
