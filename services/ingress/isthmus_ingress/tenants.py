"""Who asks: API keys, and the tenant that each belongs to.

The file that `ISTHMUS_INGRESS_TENANTS` names has one JSON object a line (empty lines and lines that begin with ``#``
count for nothing):

    {"name": "acme", "key": "sk-…", "requests_per_min": 60, "tokens_per_min": 100000, "max_concurrent": 8}
    {"name": "batch", "sha256": ["9f86d0…", "60303a…"], "slo_class": "batch", "cache_salt": "of-my-own"}

Keys are held as digests only. One that is sent is looked up under a digest whose key is this process' own, so the time
that takes says nothing about any key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from isthmus_ingress.openai.errors import Unauthorized
from isthmus_shared.errors import ConfigInvalid

MAX_TENANTS = 1024
"""Each is a label of metrics."""
MAX_KEYS = 16
"""Of one tenant: the one in use, the next, and some for machines of its own."""
MAX_FILE_BYTES = 4 * 1024 * 1024
MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
OWN_NAMES = ("anyone", "clients")
"""Tenants that no file may name: those of a server without keys, and of keys without a name."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose a request is. `cache_salt` goes into the hashes of its prompts' prefixes, so that tenants with different
    ones never share cached KV, nor learn from its timing what others asked."""

    name: str
    slo_class: str = ""
    """Empty: the server's default."""
    cache_salt: str = ""

    def salt_with(self, asked: str | None) -> str:
        """Of a request that itself asked for a salt, or did not. No asked one gives another tenant's."""
        if asked is None:
            return self.cache_salt
        return hashlib.blake2b(f"{len(self.cache_salt)}:{self.cache_salt}{asked}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Quota:
    """None: no such limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Of prompts and answers together."""
    max_concurrent: int | None = None


ANYONE = Tenant("anyone")
"""Of a server without API keys."""
CLIENTS = Tenant("clients")
"""Of the keys in `ISTHMUS_INGRESS_API_KEYS`, which have no names."""

Count = Annotated[int, Field(ge=1, le=10**12)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Key = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", min_length=MIN_KEY_CHARS, max_length=MAX_KEY_CHARS)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    name: Word
    key: Annotated[list[Key], BeforeValidator(_several), Field(max_length=MAX_KEYS)] = []
    sha256: Annotated[list[Digest], BeforeValidator(_several), Field(max_length=MAX_KEYS)] = []
    requests_per_min: Count | None = None
    tokens_per_min: Count | None = None
    max_concurrent: Count | None = None
    slo_class: Word | None = None
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None

    @model_validator(mode="after")
    def _has_a_key(self) -> _Line:
        if not self.key and not self.sha256:
            raise ValueError("it has neither key nor sha256")
        if self.name in OWN_NAMES:
            raise ValueError(f"the name {self.name!r} is taken by Isthmus itself")
        return self


@dataclass(frozen=True, slots=True)
class Entry:
    tenant: Tenant
    quota: Quota
    digests: tuple[bytes, ...]
    """SHA-256 of each key."""


def parse_tenants(text: str, name: str) -> tuple[Entry, ...]:
    """Raises `ConfigInvalid` naming the line and what is wrong, never a key."""
    entries: list[Entry] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        entry = _entry(line, f"{name}:{number}")
        if entry.tenant.name in names:
            raise _invalid(f"{name}:{number}", f"tenant {entry.tenant.name!r} is named twice")
        if digests.intersection(entry.digests) or len(set(entry.digests)) < len(entry.digests):
            raise _invalid(f"{name}:{number}", "one of its keys was given before")
        if len(entries) == MAX_TENANTS:
            raise _invalid(f"{name}:{number}", f"more than {MAX_TENANTS} tenants")
        names.add(entry.tenant.name)
        digests.update(entry.digests)
        entries.append(entry)
    return tuple(entries)


def _entry(line: str, where: str) -> Entry:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else "cannot be read"
        raise _invalid(where, f"not JSON: {why}") from None  # the error's own text holds the line
    if not isinstance(fields, dict):
        raise _invalid(where, "a line is a JSON object")
    try:
        made = _Line.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part)[:64] for part in first["loc"])
        raise _invalid(where, f"{field}: {first['msg']}" if field else first["msg"]) from None
    salt = made.name if made.cache_salt is None else made.cache_salt
    hashed = [hashlib.sha256(key.encode()).digest() for key in made.key]
    return Entry(
        Tenant(made.name, made.slo_class or "", salt),
        Quota(made.requests_per_min, made.tokens_per_min, made.max_concurrent),
        (*hashed, *(bytes.fromhex(text) for text in made.sha256)),
    )


def _invalid(where: str, why: str) -> ConfigInvalid:
    todo = "one JSON object a line: name, key or sha256, and what limits it (docs/security.md)"
    return ConfigInvalid(f"{where} is no tenant", why=why, todo=todo, param="ISTHMUS_INGRESS_TENANTS")


def read_tenants(path: Path) -> tuple[Entry, ...]:
    """Raises `ConfigInvalid`, also when the file cannot be read or has nobody in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise _unreadable(path, "it is not UTF-8") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(path, why) from None
    entries = parse_tenants(text, path.name)
    if not entries:
        raise _unreadable(path, "nobody is in it")
    return entries


def readable_by_others(path: Path) -> bool:
    """Whether its mode lets everybody on this host read it."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _unreadable(path: Path, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"the tenants in {path} cannot be had", why=why, param="ISTHMUS_INGRESS_TENANTS")


class Keyring:
    """Empty: everybody is `ANYONE`."""

    def __init__(self, *, api_keys: Sequence[str] = (), entries: Iterable[Entry] = ()) -> None:
        self._seal = secrets.token_bytes(32)
        self._by_seal: dict[bytes, tuple[bytes, Tenant]] = {}
        self.quotas: dict[Tenant, Quota] = {}
        if api_keys:
            self._add(CLIENTS, [hashlib.sha256(key.encode()).digest() for key in api_keys])
        for entry in entries:
            self._add(entry.tenant, entry.digests)
            self.quotas[entry.tenant] = entry.quota

    def _add(self, tenant: Tenant, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._by_seal.setdefault(self._sealed(digest), (digest, tenant))

    @property
    def needs_keys(self) -> bool:
        return bool(self._by_seal)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """By name."""
        return {tenant.name: tenant for _, tenant in self._by_seal.values()}

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Whose key ``Bearer <key>`` brings. Raises `Unauthorized`."""
        if not self._by_seal:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        known, tenant = self._by_seal.get(self._sealed(digest), (b"", ANYONE))
        if scheme.lower() == "bearer" and hmac.compare_digest(known, digest):
            return tenant
        raise Unauthorized(
            "Incorrect API key provided" if authorization else "You didn't provide an API key",
            todo="send Authorization: Bearer with one of this server's keys",
        )

    def _sealed(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._seal, digest_size=32).digest()
