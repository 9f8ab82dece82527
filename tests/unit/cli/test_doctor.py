from __future__ import annotations

import errno
import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isthmus_cli import checks
from isthmus_cli.doctor import show
from isthmus_cli.main import app
from isthmus_kvrelay.transports.verbs.doctor import Finding, Grade
from isthmus_shared.errors import ConfigInvalid


def proc_with(folder: Path, *, rmem: str = "4096 131072 33554432", available_kib: int = 1 << 20) -> Path:
    tcp = folder / "sys/net/ipv4"
    tcp.mkdir(parents=True)
    (tcp / "tcp_rmem").write_text(rmem)
    (tcp / "tcp_wmem").write_text("4096 16384 33554432")
    (folder / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    return folder


def test_every_finding_that_is_not_ok_names_what_mends_it(tmp_path: Path) -> None:
    def no_memory_file(name: str) -> int:
        raise OSError(errno.ENOSYS, "no memfd")

    def no_package(name: str) -> str:
        raise checks.importlib.metadata.PackageNotFoundError(name)

    clock = tmp_path / "sys/devices/system/clocksource/clocksource0"
    clock.mkdir(parents=True)
    (clock / "current_clocksource").write_text("hpet\n")
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    proc = proc_with(tmp_path / "proc", rmem="4096 65536 212992", available_kib=64 << 10)
    findings = [
        checks.check_python((3, 10, 1)),
        checks.check_torch(no_package),
        checks.check_shared_memory(no_memory_file, proc),
        checks.check_pool(256 << 20, proc),
        *checks.check_socket_buffers(proc),
        checks.check_files(256),
        checks.check_clock(tmp_path / "sys"),
        checks.check_numa(tmp_path / "sys"),
    ]
    wrong = [finding for finding in findings if finding.grade is not Grade.OK]
    assert [finding.check for finding in wrong] == [
        "python", "torch", "shared memory", "pool", "socket buffers", "descriptors", "clock", "numa",
    ]  # fmt: skip
    assert all(finding.mend for finding in wrong)


def test_a_sound_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    proc = proc_with(tmp_path)
    findings = [checks.check_python((3, 12)), checks.check_pool(256 << 20, proc), *checks.check_socket_buffers(proc)]
    assert {finding.grade for finding in findings} == {Grade.OK}


def test_a_taken_port_is_found_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert checks.check_port(taken.getsockname()[1]).grade is Grade.WARNING
    assert checks.check_port(0).grade is Grade.OK


def test_a_kernel_without_rdma_is_no_fault() -> None:
    def none() -> checks.Binding:
        raise ConfigInvalid("no RDMA verbs library can be loaded")

    (finding,) = checks.check_rdma(1 << 20, none)
    assert finding.grade is Grade.OK
    assert "lanes go over TCP" in finding.what


@pytest.mark.parametrize(("pool_bytes", "code"), [(1 << 20, 0), (1 << 60, 1)])
def test_the_command_says_it_in_json_and_by_its_exit_code(tmp_path: Path, pool_bytes: int, code: int) -> None:
    asked = ["doctor", "--json", "--state-dir", str(tmp_path), "--pool-bytes", str(pool_bytes)]
    answer = CliRunner().invoke(app, asked)
    grades = {finding["check"]: finding["grade"] for finding in json.loads(answer.stdout)}
    assert answer.exit_code == code
    assert grades["pool"] == ("error" if code else "ok")
    assert "pair" in grades


def test_what_mends_a_finding_is_printed_to_the_letter() -> None:
    page = io.StringIO()
    show(Console(file=page, width=200), [Finding("rdma", Grade.OK, "pip install 'isthmus[rdma]'", "")])
    assert "pip install 'isthmus[rdma]'" in page.getvalue()
