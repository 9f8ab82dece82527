from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from isthmus_cli.state import ClusterState, StateDir
from isthmus_shared.errors import ConfigInvalid, Unavailable


def state(run_dir: Path) -> ClusterState:
    return ClusterState(
        supervisor_pid=os.getpid(),
        ready=True,
        model="m",
        http_url="http://127.0.0.1:1",
        bus_url="nats://u:p@127.0.0.1:2",
        run_dir=str(run_dir),
    )


def test_what_is_written_is_read_back_by_its_owner_only(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    with folder.held() as run_dir:
        folder.write(state(run_dir))
        assert StateDir(tmp_path).read() == state(run_dir)
        assert stat.S_IMODE(folder.file.stat().st_mode) == 0o600


def test_a_second_cluster_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    with folder.held() as run_dir:
        folder.write(state(run_dir))
        with pytest.raises(ConfigInvalid, match="already runs"), StateDir(tmp_path).held():
            pass
        assert StateDir(tmp_path).read() == state(run_dir)


def test_nothing_but_logs_is_left_behind(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    with folder.held() as run_dir:
        folder.write(state(run_dir))
        assert run_dir.is_dir()
    assert not run_dir.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    with pytest.raises(Unavailable, match="isthmus up"):
        folder.read()


def test_the_remains_of_a_killed_supervisor_are_not_a_cluster_and_are_cleared(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    folder.logs.mkdir(parents=True)
    remains = tmp_path / "isthmus-run-old"
    remains.mkdir()
    folder.write(state(remains))
    with pytest.raises(Unavailable):
        folder.read()
    with folder.held():
        assert not remains.exists()


def test_a_deep_state_folder_still_gets_sockets_that_fit(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    with StateDir(deep).held() as run_dir:
        assert len(os.fsencode(run_dir / "a-node-with-a-long-name.sock")) <= 100


def test_a_folder_that_cannot_be_made_is_a_setting_and_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ConfigInvalid, match=r"cannot be used.*--state-dir"), StateDir(path).held():
            pass
        with pytest.raises(Unavailable, match="no cluster runs"):
            StateDir(path).read()
