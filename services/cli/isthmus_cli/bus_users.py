"""The bus users of a local cluster: one for each process, one to look with, and one to ask over the bus with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from isthmus_cli.spec import ClusterSpec
from isthmus_shared.bus.permissions import Role
from isthmus_shared.bus.server_config import BusUser, new_password
from isthmus_shared.secret_file import write_secret

INGRESS_ID = "ingress"
OPERATOR, CLIENT = "operator", "client"
RELAY_SECRET = "relay_secret"


def users_of(spec: ClusterSpec) -> dict[str, BusUser]:
    """By the name of the process, and `OPERATOR` and `CLIENT`; each with a password of its own, made now."""
    wanted: dict[str, tuple[Role, str | None]] = {"planner": (Role.PLANNER, None)}
    for node in spec.nodes:
        if node.relay is not None:
            wanted[f"relay-{node.id}"] = (Role.RELAY, node.id)
        wanted |= {worker.id: (Role.WORKER, worker.id) for worker in node.workers}
    wanted[INGRESS_ID] = (Role.INGRESS, INGRESS_ID)
    wanted[OPERATOR] = (Role.OPERATOR, None)
    wanted[CLIENT] = (Role.CLIENT, "local")
    return {name: BusUser(role, instance, password=new_password()) for name, (role, instance) in wanted.items()}


def url_for(server_url: str, user: BusUser | None) -> str:
    """The server's URL with user and password in it; without a user as it is."""
    if user is None:
        return server_url
    parts = urlsplit(server_url)
    return parts._replace(netloc=f"{user.name}:{user.password}@{parts.netloc}").geturl()


def url_file(folder: Path, process: str) -> Path:
    return folder / f"{process}.nats_url"


def write_urls(folder: Path, urls: Mapping[str, str]) -> None:
    """One file a process, for its owner only: a password is in no environment and no command line."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for process, url in urls.items():
        write_secret(url_file(folder, process), url)
