"""The connector's scheduler half, in vLLM's order of calls, without vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_kvrelay.client.vllm.jobs import Blocks
from isthmus_kvrelay.client.vllm.params import DecodeParams, PrefillParams, parse_params
from isthmus_kvrelay.client.vllm.scheduling import GroupTable, Plan, Scheduled, Scheduling, SchedulingSettings
from isthmus_shared.errors import InvalidRequest
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.work import RelayRef
from isthmus_testing.vllm_parts import layer_specs, shape_of

RELAY = RelayRef(node_id=NodeId("a"), incarnation=Incarnation("1"), address="127.0.0.1:1")
SHAPE = shape_of(layer_specs(window_tokens=32))
SETTINGS = SchedulingSettings(SHAPE, (GroupTable(16), GroupTable(16, 32)), tp_size=1, peer_tp_size=1, deadline_s=60.0)
PREFILL = PrefillParams(do_remote_decode=True)


def tables(blocks: int = 16) -> Callable[[str], Blocks]:
    """Group 0 has blocks 1, 2, …, group 1 has 101, 102, …"""
    return lambda _request: (tuple(range(1, blocks + 1)), tuple(range(101, 101 + blocks)))


def begun(core: Scheduling, request: str, tokens: int, params: PrefillParams | DecodeParams = PREFILL) -> None:
    core.begin(request, tokens, params, transfer_id=f"xfer-{request}")


def step(core: Scheduling, *, preempted: tuple[str, ...] = (), **work: tuple[int, int]) -> Plan:
    plan = core.step({name: Scheduled(*pair) for name, pair in work.items()}, tables(), preempted)
    core.check_invariants()
    return plan


def ticket(tokens: int, **changes: Any) -> DecodeParams:
    """What a prefill engine of the same model answers."""
    shape = dataclasses.replace(SHAPE, **changes)
    core = Scheduling(dataclasses.replace(SETTINGS, shape=shape))
    begun(core, "p", tokens)
    step(core, p=(0, tokens))
    done = core.finished("p", aborted=False, relay=RELAY)
    assert done.params is not None
    found = parse_params(done.params)
    assert isinstance(found, DecodeParams)
    return found


def test_a_chunked_prefill_is_saved_step_by_step_and_held_until_sent() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 150)
    jobs = [step(core, p=(start, tokens)).jobs.saves for start, tokens in ((0, 64), (64, 64), (128, 22))]
    assert [job.computed for (job,) in jobs] == [64, 128, 150]
    assert step(core, p=(150, 1)).jobs.empty, "a decode step adds nothing"
    done = core.finished("p", aborted=False, relay=RELAY)
    assert done.held
    assert done.params is not None
    assert done.params["ticket"]["transfer_id"] == "xfer-p"
    assert step(core).jobs.empty, "nothing is dropped"


def test_a_window_keeps_its_blocks_from_the_last_prompt_step_on() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 150)
    assert step(core, p=(0, 64)).pins == {}
    # The last token, at 149, sees 118 to 149: blocks 7 to 9 of that group, and what is allocated behind them.
    assert step(core, p=(64, 86)).pins == {"p": tuple(range(108, 117))}


def test_null_blocks_are_not_pinned() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 64)
    plan = core.step({"p": Scheduled(0, 64)}, lambda _: ((1, 2, 3, 4), (0, 0, 0, 104)), ())
    assert plan.pins == {"p": (104,)}


@pytest.mark.parametrize(("aborted", "relay", "computed"), [(True, RELAY, 40), (False, None, 40), (False, RELAY, 20)])
def test_what_is_not_whole_or_not_wanted_is_dropped(aborted: bool, relay: RelayRef | None, computed: int) -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 40)
    step(core, p=(0, computed))
    done = core.finished("p", aborted=aborted, relay=relay)
    assert (done.held, done.params) == (True, None)
    assert step(core).jobs.dropped == {"p"}
    assert step(core).jobs.empty, "it is said once"


def test_a_request_that_never_ran_is_not_held() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 40)
    assert not core.finished("p", aborted=True, relay=RELAY).held
    assert not core.finished("stranger", aborted=False, relay=RELAY).held
    assert step(core).jobs.empty


def test_a_preempted_prefill_is_let_go_of_and_saved_from_its_beginning() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "p", 100)
    step(core, p=(0, 64))
    assert step(core, preempted=("p", "other")).jobs.preempted == {"p"}
    (job,) = step(core, p=(0, 32)).jobs.saves
    assert job.computed == 32
    (job,) = step(core, p=(32, 68)).jobs.saves
    assert job.computed == 100


def test_a_load_covers_what_the_engine_has_not_and_is_asked_for_once() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "d", 150, ticket(150))
    assert core.matched("d", 0) == 150
    assert core.matched("d", 48) == 102
    core.allocated("d", tables()("d"), 102)
    core.allocated("d", tables()("d"), 0)
    (job,) = step(core).jobs.loads
    assert (job.start, job.end, job.refusal) == (48, 150, None)
    assert (job.origin.address, job.flow.transfer_id) == (RELAY.address, "xfer-p")
    core.received("d")
    assert core.matched("d", 0) == 0, "preempted or failed, it is computed here"
    assert step(core, d=(149, 1)).jobs.empty
    assert not core.finished("d", aborted=False, relay=RELAY).held
    assert step(core).jobs.empty


def test_a_prompt_may_go_on_behind_what_was_prefilled() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "d", 151, ticket(150))
    assert core.matched("d", 0) == 150
    core.allocated("d", tables()("d"), 150)
    (job,) = step(core).jobs.loads
    assert (job.start, job.end, job.refusal) == (0, 150, None)


def test_a_request_that_ends_while_it_loads_is_cancelled() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "d", 40, ticket(40))
    core.allocated("d", tables()("d"), core.matched("d", 0))
    step(core)
    assert not core.finished("d", aborted=True, relay=RELAY).held
    assert step(core).jobs.cancelled == {"d"}
    core.received("d")
    core.check_invariants()


def test_a_request_that_ends_before_its_load_gives_the_other_side_its_staging_back() -> None:
    core = Scheduling(SETTINGS)
    begun(core, "d", 40, ticket(40))
    core.finished("d", aborted=True, relay=RELAY)
    (discard,) = step(core).jobs.discarded
    assert (discard.flow.transfer_id, discard.origin.address) == ("xfer-p", RELAY.address)


@pytest.mark.parametrize(
    ("tokens", "changes", "named"),
    [
        (41, {}, "41 tokens"),
        (40, {"model_fingerprint": "e" * 64}, "model_fingerprint"),
        (40, {"groups": SHAPE.groups[:1]}, "groups"),
    ],
)
def test_kv_of_something_else_is_refused_without_a_fetch(tokens: int, changes: dict[str, Any], named: str) -> None:
    core = Scheduling(SETTINGS)
    begun(core, "d", 40, ticket(tokens, **changes))
    assert core.matched("d", 0) == 40, "vLLM takes no more than the prompt has"
    core.allocated("d", tables()("d"), 40)
    (job,) = step(core).jobs.loads
    assert job.refusal is not None
    assert named in job.refusal


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "both set"),
        ({"do_remote_decode": True, "generation": 0}, "generation"),
        ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id"),
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({"do_remote_prefill": True}, "ticket"),
        ({"do_remote_prefill": True, "ticket": {"transfer_id": 3}}, "ticket.transfer_id"),
        ({"do_remote_prefill": True, "ticket": "x" * 1000}, "ticket"),
    ],
)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_params(params)
    assert named in refused.value.text


def test_parameters_of_other_connectors_are_passed_over() -> None:
    assert parse_params(None) is None
    assert parse_params({"do_remote_decode": False, "remote_host": "b"}) is None
    found = parse_params({"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None})
    assert found == PREFILL


EVENTS = st.tuples(st.sampled_from("abc"), st.sampled_from(["begin", "run", "preempt", "finish", "sent"]))


@given(st.lists(EVENTS, max_size=60))
def test_in_any_order_who_is_saved_is_held_exactly_once(events: list[tuple[str, str]]) -> None:
    core = Scheduling(SETTINGS)
    computed: dict[str, int] = {}
    saved: set[str] = set()
    held: set[str] = set()
    for name, event in events:
        if event == "begin" and name not in computed and name not in held:
            begun(core, name, 100)
            computed[name] = 0
        elif event == "run" and name in computed:
            saves = step(core, **{name: (computed[name], 30)}).jobs.saves
            if saves:
                assert saves[0].computed == min(100, computed[name] + 30)
                saved.add(name)
            computed[name] += 30
        elif event == "preempt" and name in computed:
            step(core, preempted=(name,))
            computed[name] = 0
        elif event == "finish" and name in computed:
            done = core.finished(name, aborted=False, relay=RELAY)
            assert done.held == (name in saved)
            assert (done.params is not None) == (computed[name] >= 100 and done.held)
            held |= {name} if done.held else set()
            saved.discard(name)
            del computed[name]
        elif event == "sent" and name in held:
            core.sent(name)
            held.discard(name)
        core.check_invariants()
