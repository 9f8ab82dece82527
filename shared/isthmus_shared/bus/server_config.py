"""The configuration of a nats-server whose every user may do only what its role needs. JSON, which the server reads.

It holds passwords (of nkey users only public keys): write it with `secret_file.write_secret`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus_shared.bus.permissions import ANSWER_WITHIN, Role, grant_of, user_name
from isthmus_shared.bus.server import JETSTREAM_BYTES, MAX_PAYLOAD_BYTES

ACCOUNT = "ISTHMUS"
PASSWORD_BYTES = 32


@dataclass(frozen=True, slots=True)
class BusUser:
    """`instance` None: any of its role. Either a password or an nkey (its public key, ``U…``)."""

    role: Role
    instance: str | None = None
    password: str | None = field(default=None, repr=False)
    nkey: str | None = None

    @property
    def name(self) -> str:
        return user_name(self.role, self.instance)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files. With `ca`, a client must show a certificate of that authority."""

    cert: Path
    key: Path
    ca: Path | None = None


def new_password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


def accounts(users: Sequence[BusUser], *, jetstream: bool) -> dict[str, object]:
    """Whoever is not among `users` is refused. `jetstream`: whether the server has it (for the planner's lease)."""
    account: dict[str, object] = {"users": [_user(user) for user in users]}
    if jetstream:
        account["jetstream"] = "enabled"
    return {"accounts": {ACCOUNT: account}}


def settings(
    users: Sequence[BusUser],
    *,
    port: int,
    monitor_port: int | None = None,
    tls: ServerTls | None = None,
    jetstream_dir: Path | None = None,
) -> dict[str, object]:
    """The whole configuration of a server that listens on every address."""
    made: dict[str, object] = {
        "port": port,
        "max_payload": MAX_PAYLOAD_BYTES,
        "max_pending": max(64 * 1024 * 1024, 2 * MAX_PAYLOAD_BYTES),
        **accounts(users, jetstream=jetstream_dir is not None),
    }
    if monitor_port is not None:
        made["http"] = f"127.0.0.1:{monitor_port}"
    if jetstream_dir is not None:
        limits = {"max_memory_store": JETSTREAM_BYTES, "max_file_store": JETSTREAM_BYTES}
        made["jetstream"] = {"store_dir": str(jetstream_dir), **limits}
    if tls is not None:
        files: dict[str, object] = {"cert_file": str(tls.cert), "key_file": str(tls.key), "min_version": "1.3"}
        if tls.ca is not None:
            files |= {"ca_file": str(tls.ca), "verify": True}
        made["tls"] = files
    return made


def _user(user: BusUser) -> dict[str, object]:
    grant = grant_of(user.role, user.instance)
    permissions: dict[str, object] = {
        "publish": {"allow": list(grant.publish)},
        "subscribe": {"allow": list(grant.subscribe)},
    }
    if grant.answers:
        permissions["allow_responses"] = {"max": 1, "expires": ANSWER_WITHIN}
    assert (user.password is None) != (user.nkey is None), "a user has a password or an nkey"
    who = {"nkey": user.nkey} if user.nkey is not None else {"user": user.name, "password": user.password}
    return {**who, "permissions": permissions}


def as_text(fields: dict[str, object]) -> str:
    return json.dumps(fields, indent=1)
