"""The pair tests of `isthmus doctor`, over real relays."""

from __future__ import annotations

from pathlib import Path

from isthmus_cli.pairs import check_pairs
from isthmus_kvrelay.transports.verbs.doctor import Grade
from isthmus_testing import eventually
from isthmus_testing.relay import daemon_settings, running

ROOMY = {"total_slots": 256}


async def test_each_pair_of_relays_is_tested_and_nothing_stays(tmp_path: Path) -> None:
    async with (
        running(daemon_settings(tmp_path, "a", **ROOMY)) as a,
        running(daemon_settings(tmp_path, "b", **ROOMY)) as b,
    ):
        told: list[tuple[str, int, int]] = []
        sockets = {"a": tmp_path / "a.sock", "b": tmp_path / "b.sock"}
        findings = await check_pairs(sockets, lambda *step: told.append(step))
        assert told == [("a → a", 0, 4), ("a → b", 1, 4), ("b → a", 2, 4), ("b → b", 3, 4)]
        assert [(f.check, f.grade) for f in findings] == [("pair", Grade.OK)] * 4
        await eventually(lambda: not a.lost and a.daemon.stats().clients == b.daemon.stats().clients == 0)


async def test_relays_that_do_not_trust_each_other_and_one_that_is_gone_are_named(tmp_path: Path) -> None:
    async with (
        running(daemon_settings(tmp_path, "a", **ROOMY)),
        running(daemon_settings(tmp_path, "b", secret=b"another secret of theirs", **ROOMY)),
    ):
        findings = await check_pairs({name: tmp_path / f"{name}.sock" for name in ("a", "b", "gone")}, lambda *_: None)
        wrong = {(f.check, f.what.partition(":")[0]) for f in findings if f.grade is Grade.ERROR}
        assert wrong == {("relay", "the relay of gone"), ("pair", "a → b"), ("pair", "b → a")}
        assert all(f.mend for f in findings if f.grade is Grade.ERROR)
