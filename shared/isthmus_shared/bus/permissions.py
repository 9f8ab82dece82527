"""Who may say and hear what on the bus: worked out from the catalogue of channels, so that a subject has its publishers
and listeners in one place (`messages/catalog.py`) and nowhere else.

A user of the bus is named ``<role>`` or ``<role>.<instance>``, e.g. ``planner`` or ``worker.decode-b``. One with an
instance speaks and hears under that name only: worker a's user cannot take worker b's work. Each user's replies come
to inboxes of its own, ``_INBOX.<user>.…``, which no other may listen to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from isthmus_shared.bus.syntax import INBOX, matches
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.messages import subjects
from isthmus_shared.messages.catalog import CHANNELS, Channel

PLANNER_BUCKET = "isthmus_planner"
"""The planner's lease lies in this JetStream key-value bucket."""


class Role(StrEnum):
    INGRESS = "ingress"
    PLANNER = "planner"
    WORKER = "worker"
    """Prefill and decode: which of them it is may change while it runs."""
    RELAY = "relay"
    CLIENT = "client"
    """A program that asks over the bus; each needs a user of its own, or it can read the others' answers."""
    OPERATOR = "operator"
    """Looks, and asks planners; changes nothing."""


PARTIES: Mapping[str, Role] = MappingProxyType(
    {
        "ingress": Role.INGRESS,
        "planner": Role.PLANNER,
        "prefill-worker": Role.WORKER,
        "decode-worker": Role.WORKER,
        "kvrelay": Role.RELAY,
        "client": Role.CLIENT,
        "isthmus status": Role.OPERATOR,
        "isthmus explain": Role.OPERATOR,
        "operator": Role.OPERATOR,
    }
)
"""What the catalogue calls them."""
INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Grant:
    """Patterns of subjects. What a user has been asked it may always answer, once and for `ANSWER_WITHIN`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool


ANSWER_WITHIN = "2m"
"""Longer than any answer takes: a planner holds a question for one minute at most."""


def user_name(role: Role, instance: str | None = None) -> str:
    """Raises `ConfigInvalid` when the instance cannot be part of a subject."""
    if instance is None:
        return role.value
    if not INSTANCE.fullmatch(instance):
        raise ConfigInvalid(
            f"{instance[:64]!r} cannot be the name of a {role} on the bus",
            why="allowed are 1 to 64 letters, digits, - and _",
        )
    return f"{role}.{instance}"


def grant_of(role: Role, instance: str | None = None) -> Grant:
    """All that a user of that role, and name, may do."""
    user = user_name(role, instance)
    inbox = f"{INBOX}.{user}.>"
    publish = [inbox, *(_address(c, role, instance) for c in CHANNELS if role in _roles(c.publishers))]
    subscribe = [inbox, *(_address(c, role, instance) for c in CHANNELS if role in _roles(c.listeners))]
    match role:
        case Role.INGRESS:
            publish.append(f"{INBOX}.{Role.CLIENT}.>")  # a stream is many answers to one question
        case Role.PLANNER:
            publish += _bucket(PLANNER_BUCKET)
        case Role.OPERATOR:
            publish.append("$SRV.>")
            subscribe += [f"{subjects.ROOT}.heartbeat.*", f"{subjects.ROOT}.event.*"]
    if _serves(role):
        subscribe += ["$SRV.>"]
    return Grant(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)), answers=_serves(role))


def allows(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


def _serves(role: Role) -> bool:
    return role not in (Role.CLIENT, Role.OPERATOR)


def _roles(parties: tuple[str, ...]) -> set[Role]:
    return {PARTIES[party] for party in parties}


def _address(channel: Channel, role: Role, instance: str | None) -> str:
    """The channel's subject with this user's own name in its place, and any name in the others'."""
    own = "{" + role.value + "}"
    return re.sub(r"\{\w+\}", lambda m: instance if m[0] == own and instance is not None else "*", channel.address)


def _bucket(name: str) -> list[str]:
    """Making, reading and writing one key-value bucket, and no other stream."""
    api, stream = "$JS.API.STREAM", f"KV_{name}"
    return [f"$KV.{name}.>", *(f"{api}.{verb}.{stream}" for verb in ("CREATE", "INFO", "MSG.GET"))]
