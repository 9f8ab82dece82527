"""Every subject that the code knows is in the catalogue, and so is somebody's to say and somebody's to hear."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus_shared.bus.permissions import PARTIES, Role, allows, grant_of, user_name
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.catalog import CHANNELS

ROOT = Path(__file__).parents[3]


def test_every_subject_of_the_code_is_a_channel() -> None:
    addresses = {channel.address for channel in CHANNELS}
    constants = {
        value
        for name, value in vars(subjects).items()
        if isinstance(value, str) and value.startswith(f"{subjects.ROOT}.") and "*" not in value
    }
    made = {
        function(*(f"{{{name}}}" for name in inspect.signature(function).parameters))
        for _, function in inspect.getmembers(subjects, inspect.isfunction)
    }
    assert constants | made == addresses


def test_everybody_in_the_catalogue_has_a_role() -> None:
    parties = {party for channel in CHANNELS for party in (*channel.publishers, *channel.listeners)}
    assert parties <= set(PARTIES)


@pytest.mark.parametrize("role", Role)
def test_a_role_may_say_and_hear_what_the_catalogue_has_it_say_and_hear_and_no_more(role: Role) -> None:
    grant = grant_of(role, "me")
    for channel in CHANNELS:
        subject = channel.address.replace(f"{{{role}}}", "me").replace("{", "").replace("}", "")
        assert allows(grant.publish, subject) == any(PARTIES[p] is role for p in channel.publishers), subject
        hears = any(PARTIES[p] is role for p in channel.listeners)
        if role is Role.OPERATOR:  # looks at what goes by
            hears = hears or subject.startswith((f"{subjects.ROOT}.heartbeat.", f"{subjects.ROOT}.event."))
        assert allows(grant.subscribe, subject) == hears, subject


def test_a_user_with_an_instance_has_only_that_one() -> None:
    mine, others = subjects.worker_prefill(WorkerId("a")), subjects.worker_prefill(WorkerId("b"))
    assert allows(grant_of(Role.WORKER, "a").subscribe, mine)
    assert not allows(grant_of(Role.WORKER, "a").subscribe, others)
    assert allows(grant_of(Role.WORKER).subscribe, others)
    assert allows(grant_of(Role.INGRESS, "i").publish, others)
    assert allows(grant_of(Role.CLIENT, "c").publish, subjects.api_cancel("c", "1"))
    assert not allows(grant_of(Role.CLIENT, "c").publish, subjects.api_cancel("d", "1"))


@pytest.mark.parametrize("role", Role)
def test_inboxes_are_ones_own(role: Role) -> None:
    grant = grant_of(role, "me")
    assert allows(grant.subscribe, f"_INBOX.{user_name(role, 'me')}.x.1")
    for other in Role:
        for name in (user_name(other), user_name(other, "you")):
            assert not allows(grant.subscribe, f"_INBOX.{name}.x.1")
            says = allows(grant.publish, f"_INBOX.{name}.x.1")
            assert says == (role is Role.INGRESS and other is Role.CLIENT), name


def test_only_planners_touch_streams_and_only_their_own() -> None:
    for role in Role:
        streams = [pattern for pattern in grant_of(role).publish if pattern.startswith(("$JS", "$KV"))]
        assert bool(streams) == (role is Role.PLANNER)
        assert all("isthmus_planner" in pattern for pattern in streams)
        assert not any(pattern in (">", "$JS.>", "$JS.API.>", "$KV.>") for pattern in streams)


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "ä", "x" * 65])
def test_a_name_that_could_widen_a_subject_is_refused(name: str) -> None:
    with pytest.raises(ConfigInvalid):
        grant_of(Role.WORKER, name)


SAYS = {"publish", "request", "heartbeat"}
HEARS = {"subscribe", "subscribed", "serve", "watch"}
FOLDERS = {
    Role.INGRESS: ("services/ingress",),
    Role.PLANNER: ("services/planner",),
    Role.WORKER: ("services/worker", "services/prefill-worker", "services/decode-worker"),
    Role.RELAY: ("kvrelay",),
    Role.OPERATOR: ("services/cli",),
}


def used(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(where, what is called, a subject that is named in the call's arguments), wherever a file names one there."""
    for path in sorted(folder.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called not in SAYS | HEARS:
                continue
            for argument in call.args:
                named = argument.func if isinstance(argument, ast.Call) else argument
                if isinstance(named, ast.Attribute) and getattr(named.value, "id", "") == "subjects":
                    known = getattr(subjects, named.attr)
                    names = inspect.signature(known).parameters if callable(known) else ()
                    yield f"{path.name}:{call.lineno}", called, known(*("x" for _ in names)) if names else known


@pytest.mark.parametrize("role", FOLDERS)
def test_a_service_says_and_hears_only_what_its_role_may(role: Role) -> None:
    grant, found = grant_of(role), 0
    for folder in FOLDERS[role]:
        for where, called, subject in used(ROOT / folder):
            found += 1
            patterns = grant.publish if called in SAYS else grant.subscribe
            assert allows(patterns, subject), f"{where}: {called} {subject}: name {role} in messages/catalog.py"
    assert found > 0
