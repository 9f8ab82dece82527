"""`isthmus nats-config`, and what a server makes of its configuration."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_cli.main import app
from isthmus_shared.bus.login import BusLogin
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.permissions import Role
from isthmus_shared.bus.server import EmbeddedNats, nats_server_binary
from isthmus_shared.bus.user_files import Wanted, users_of, write
from isthmus_shared.errors import BusForbidden
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages import subjects
from isthmus_testing.local_cluster import environment

NAMED = ("--worker", "w1", "--worker", "w2", "--client", "acme", "--jetstream-dir", "leases")
USERS = {"ingress", "planner", "worker.w1", "worker.w2", "relay", "client.acme", "operator"}


def made(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["nats-config", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("nkeys", [(), ("--nkeys",)], ids=["passwords", "nkeys"])
def test_a_server_takes_it_and_only_its_owner_may_read_it(tmp_path: Path, nkeys: tuple[str, ...]) -> None:
    folder = tmp_path / "bus"
    told = made(folder, *NAMED, *nkeys, "--json")
    assert {user["user"] for user in json.loads(told)["users"]} == USERS
    assert {path.name for path in folder.iterdir()} == {*USERS, "server"}
    check = [str(nats_server_binary()), "-t", "-c", str(folder / "server" / "nats.conf")]
    done = subprocess.run(check, check=False, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for name in USERS:
        secret = (
            (folder / name / ("nats_nkey" if nkeys else "nats_url")).read_text().partition("@")[0].rpartition(":")[2]
        )
        assert len(secret) > 40
        assert secret not in told


@pytest.mark.parametrize("nkeys", [False, True], ids=["passwords", "nkeys"])
async def test_each_user_may_do_its_part(tmp_path: Path, nkeys: bool) -> None:
    users = users_of({Role.WORKER: ["w1", "w2"]})
    write(tmp_path, Wanted(users, "127.0.0.1", 4222, nkeys=nkeys, tls=None, jetstream_dir=None))
    fields = json.loads((tmp_path / "server" / "nats.conf").read_text())
    del fields["port"]
    async with EmbeddedNats(settings=fields) as server:
        url = (
            (tmp_path / "worker.w1" / "nats_url").read_text().replace("127.0.0.1:4222", server.url.partition("://")[2])
        )
        seed = (tmp_path / "worker.w1" / "nats_nkey").read_text() if nkeys else None
        async with (
            await NatsBus.connect(url, name="x", login=BusLogin(nkey=seed)) as bus,
            bus.subscribe(subjects.worker_prefill(WorkerId("w1"))),
        ):
            with pytest.raises(BusForbidden, match=r"worker\.w1"):
                async with bus.subscribe(subjects.worker_prefill(WorkerId("w2"))):
                    pass


@pytest.mark.parametrize("nkeys", [(), ("--nkeys",)], ids=["passwords", "nkeys"])
def test_whoever_is_there_keeps_its_secret_when_another_is_added(tmp_path: Path, nkeys: tuple[str, ...]) -> None:
    made(tmp_path, "--worker", "w1", *nkeys)
    files = {path: path.read_text() for path in tmp_path.rglob("nats_*") if path.name != "nats.conf"}
    made(tmp_path, "--worker", "w1", "--worker", "w2", *nkeys)
    assert {path: path.read_text() for path in files} == files
    assert (tmp_path / "worker.w2" / "nats_url").exists()
    assert len(set(files.values())) == len(files)


@pytest.mark.parametrize(
    "options",
    [("--worker", "a.b"), ("--client", ">"), ("--tls-cert", "c.pem"), ("--tls-ca", "ca.pem")],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["nats-config", str(tmp_path / "bus"), *options])
    assert result.exit_code == 2
    assert result.output.startswith("isthmus: ")
    assert result.output.count("\n") == 1


def texts_in(folder: Path) -> dict[Path, str]:
    return {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_in_compose_each_role_finds_its_own_password_and_no_other(tmp_path: Path) -> None:
    """compose/setup.py, whose folders are volumes of their own."""
    setup = Path(__file__).parents[3] / "compose" / "setup.py"
    for _ in range(2):  # the second time it finds all that the first has made
        found = texts_in(tmp_path / "s")
        (tmp_path / "m").mkdir(exist_ok=True)
        command = [sys.executable, str(setup), str(tmp_path / "s"), str(tmp_path / "m"), "nats"]
        (tmp_path / "s").mkdir(exist_ok=True)
        subprocess.run(command, check=True, timeout=60, env=environment())
    files = texts_in(tmp_path / "s")
    assert files == found
    roles = {role.value for role in Role}
    urls = {f"{role}/nats_url" for role in roles}
    assert {str(path) for path in files} == urls | {"server/nats.conf", "relay/relay_secret"}
    passwords = {role: files[Path(role, "nats_url")].partition("@")[0].rpartition(":")[2] for role in roles}
    assert len(set(passwords.values())) == len(roles)
    for role, password in passwords.items():
        holders = {path.parts[0] for path, text in files.items() if password in text}
        assert holders == {role, "server"}
    compose = (setup.parent / "compose.yaml").read_text()
    assert {name for name in ("server", *roles) if f"secrets-{name}:/secrets/{name}" in compose} == {"server", *roles}
