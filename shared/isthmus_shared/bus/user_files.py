"""Files of a bus server and its users: the configuration, and for each user a URL with its password, or an nkey."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus_shared.bus.permissions import Role, user_name
from isthmus_shared.bus.server_config import BusUser, ServerTls, as_text, new_password, settings
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.secret_file import write_secret

CONFIG = Path("server", "nats.conf")
URL, NKEY = "nats_url", "nats_nkey"
SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Wanted:
    """Users by name, and how processes reach the server."""

    users: Mapping[str, tuple[Role, str | None]]
    host: str
    port: int
    nkeys: bool
    tls: ServerTls | None
    jetstream_dir: Path | None
    monitor_port: int | None = None


def users_of(instances: Mapping[Role, Iterable[str]]) -> dict[str, tuple[Role, str | None]]:
    """One of each role, and those with a name of their own. A role that has named ones has no other."""
    made: dict[str, tuple[Role, str | None]] = {}
    for role in Role:
        named: list[str | None] = list(instances.get(role, ()))
        for instance in named or [None]:
            made[user_name(role, instance)] = (role, instance)
    return made


def write(folder: Path, wanted: Wanted) -> list[Path]:
    """Writes ``server/nats.conf``, and ``<user>/nats_url`` (and ``<user>/nats_nkey``) for each. What a user had already
    it keeps, so that another can be added later. Returns the folders of the users. Raises `ConfigInvalid`."""
    try:
        (folder / CONFIG).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        users = [_user(folder / name, name, role, of, wanted) for name, (role, of) in wanted.users.items()]
        made = settings(
            users,
            port=wanted.port,
            monitor_port=wanted.monitor_port,
            tls=wanted.tls,
            jetstream_dir=wanted.jetstream_dir,
        )
        write_secret(folder / CONFIG, as_text(made) + "\n")
    except OSError as error:
        raise ConfigInvalid(f"{folder} cannot be written", why=error.strerror or str(error)) from error
    return [folder / name for name in wanted.users]


def _user(folder: Path, name: str, role: Role, instance: str | None, wanted: Wanted) -> BusUser:
    folder.mkdir(mode=0o700, exist_ok=True)
    url, scheme = folder / URL, "nats" if wanted.tls is None else "tls"
    if wanted.nkeys:
        seed, public = _nkey(folder / NKEY)
        write_secret(folder / NKEY, seed)
        write_secret(url, f"{scheme}://{name}@{wanted.host}:{wanted.port}")
        return BusUser(role, instance, nkey=public)
    password = _password(url, name) or new_password()
    write_secret(url, f"{scheme}://{name}:{password}@{wanted.host}:{wanted.port}")
    return BusUser(role, instance, password=password)


def _password(url: Path, name: str) -> str | None:
    """The one that the file has."""
    try:
        found, at, _ = url.read_text(encoding="utf-8").partition("://")[2].partition("@")
    except FileNotFoundError:
        return None
    user, colon, password = found.partition(":")
    return password if at and colon and user == name and password else None


def _nkey(path: Path) -> tuple[str, str]:
    """(seed, public key): those that the file has, or new ones."""
    try:
        import nkeys
    except ImportError as error:
        raise ConfigInvalid(
            "no nkeys can be made", why="the Python package nkeys is not installed", todo="pip install 'isthmus[nkeys]'"
        ) from error
    try:
        seed = path.read_bytes().strip()
    except FileNotFoundError:
        seed = nkeys.encode_seed(secrets.token_bytes(SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    try:
        public: bytes = nkeys.from_seed(bytearray(seed)).public_key
    except (nkeys.NkeysError, ValueError, IndexError):
        raise ConfigInvalid(f"{path} holds no seed of an nkey", todo="remove it to have one made") from None
    return seed.decode(), public.decode()
