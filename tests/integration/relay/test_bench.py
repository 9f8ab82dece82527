"""The bench's processes: that they measure what they say, and end. Not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus_kvrelay.bench import report
from isthmus_kvrelay.bench.burst import Burst
from isthmus_kvrelay.bench.children import ChildFailed
from isthmus_kvrelay.bench.contenders import Limits, PairContender, RelayContender, sockets
from isthmus_kvrelay.bench.decode_process import RESIDENT
from isthmus_kvrelay.bench.hand_over import HandOver, HandOverPair
from isthmus_kvrelay.bench.relay_bench import Paced, RelayBench
from isthmus_kvrelay.bench.transfer import Round, Series, ratio
from isthmus_kvrelay.bench.workloads import MIB, WORKLOADS

SMALL = WORKLOADS["1 x 1 MiB"]
PAGED = WORKLOADS["64 x 16 x 64 KiB"]
FEW = Limits(min_s=0, min_n=2, max_n=2)


@pytest.mark.slow
def test_the_relay_moves_a_workload_and_its_bytes_are_looked_at(tmp_path: Path) -> None:
    for options in ({}, {"checksums": False, "copies": True}):
        folder = tmp_path / "-".join(options or ["plain"])
        folder.mkdir()
        relay = RelayContender(folder, **options)
        try:
            assert relay.intact(PAGED)
            assert len(relay.series(PAGED, FEW)) == 2
            assert len(relay.reserve_s) == 2
            assert all(child.cpu_s() > 0 for child in relay.children)
        finally:
            relay.close()
    with pytest.raises(FileNotFoundError):
        relay.children[0].cpu_s()


def test_a_hand_over_on_one_node_goes_through_its_one_relay(tmp_path: Path) -> None:
    pair = HandOverPair(tmp_path)
    try:
        assert all(0 < took_s < 10 for took_s in pair.series(4 * MIB, 3))
    finally:
        pair.close()


@pytest.mark.parametrize("streams", [1, 2])
def test_the_sockets_move_every_workload_whole(streams: int) -> None:
    yardstick = sockets(streams)
    try:
        assert yardstick.intact(SMALL)
        assert yardstick.intact(PAGED)
    finally:
        yardstick.close()


def test_a_process_that_fails_is_a_failed_measurement() -> None:
    with pytest.raises(ChildFailed, match="ended with status"):
        PairContender("isthmus_kvrelay.bench.no_such_module")


def test_a_paced_relay_is_slower_than_its_rate_allows_by_nothing(tmp_path: Path) -> None:
    """But for a tenth: the relay's clock stands still during a turn of its loop, which other processes may prolong."""
    rate = 64 * MIB
    relay = RelayContender(tmp_path, settings={"ISTHMUS_RELAY_RATE_BYTES_PER_S": str(rate)})
    try:
        relay.intact(SMALL)
        (took_s,) = relay.series(PAGED, Limits(min_s=0, min_n=1, max_n=1))
        assert took_s >= 0.9 * (PAGED.total_bytes - 4 * MIB) / rate
    finally:
        relay.close()


def series(rate: float) -> Round:
    return Round(series={name: Series(rate, 1 / rate, 100.0, 200.0, 3) for name in WORKLOADS})


def test_ratios_are_taken_within_a_round_with_the_best_of_the_others() -> None:
    figures = {"one socket": [series(2.0), series(1.0)], "two sockets": [series(1.0), series(4.0)]}
    figures["relay"] = [series(1.0), series(2.0)]
    others = ["one socket", "two sockets"]
    assert ratio(figures, "relay", others, PAGED.name, "gb_per_s") == 0.5
    assert ratio(figures, "relay", others, PAGED.name, "cpu_s_per_gb") == 2.0


def test_all_figures_become_text_and_json() -> None:
    burst = Burst(0.007, 0.010, 0.008, 0.011, 0.2, 3, RESIDENT)
    figures = {name: [series(1.0)] for name in ("one socket", "two sockets", "relay")}
    bench = RelayBench({}, figures, [HandOver(MIB, 9e-5, 2e-4)], [Paced(1e8, 0.99e8)], {"paced": burst})
    text = bench.as_text()
    assert "| 1024 KiB | 90 | 200 |" in text
    assert "| 100 | 99.0 | -1.0% |" in text
    assert "+10%" in text
    assert report.YARDSTICK[0] in text
    assert json.loads(json.dumps(bench.as_json()))["transfers"]["relay"][0]["series"][PAGED.name]["gb_per_s"] == 1.0
