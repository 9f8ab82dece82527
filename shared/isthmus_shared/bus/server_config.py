"""The configuration of a nats-server whose every user may do only what its role needs. JSON, which the server reads.

It holds passwords (of nkey users only public keys): write it with `write_secret`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus_shared.bus.permissions import ANSWER_WITHIN, Role, grant_of, user_name

ACCOUNT = "ISTHMUS"
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""NATS' default of 1 MiB would refuse a prompt of some 200,000 tokens; 8 MiB is the most that NATS recommends."""
PASSWORD_BYTES = 32
MAX_SUBSCRIPTIONS = 4096
"""Of one connection: an ingress has a handful and one for each request that may be cancelled over the bus."""


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


def settings(
    users: Sequence[BusUser], *, tls: ServerTls | None = None, jetstream_dir: Path | None = None
) -> dict[str, object]:
    """Fields of the server's configuration beside its address. Whoever is not among `users` is refused."""
    account: dict[str, object] = {"users": [_user(user) for user in users]}
    made: dict[str, object] = {
        "max_payload": MAX_PAYLOAD_BYTES,
        "max_pending": max(64 * 1024 * 1024, 2 * MAX_PAYLOAD_BYTES),
        "max_subscriptions": MAX_SUBSCRIPTIONS,
        "accounts": {ACCOUNT: account},
    }
    if jetstream_dir is not None:
        account["jetstream"] = "enabled"
        made["jetstream"] = {"store_dir": str(jetstream_dir)}
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


def write_secret(path: Path, text: str) -> None:
    """Whole or not at all, and for its owner only, from the first byte."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)
