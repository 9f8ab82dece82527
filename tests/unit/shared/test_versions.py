"""Two releases side by side: messages of version 1, as that release wrote them, and what it is told by this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.messages.base import PREVIOUS, VERSION
from isthmus_shared.messages.catalog import all_messages
from isthmus_shared.messages.quick import read_steps
from isthmus_shared.messages.route import RouteRequest, StagedKv
from isthmus_shared.messages.versions import as_previous, understood
from isthmus_shared.messages.work import Ack, RelayRef, SamplingParams, StepEvents, SubmitPrefill
from isthmus_testing.old_release import shape_of, unknown_in

SAMPLES = {
    kind: bytes.fromhex(text)
    for kind, text in json.loads((Path(__file__).parent / "messages_1.json").read_text()).items()
}
"""Encoded by the release of version 1: each of its messages with every field set."""


def packed(**fields: Any) -> bytes:
    data: bytes = msgpack.packb(fields)
    return data


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_message_of_the_release_before_is_read_and_answered_in_kind(kind: str) -> None:
    message = all_messages()[kind].decode(SAMPLES[kind])
    said = msgpack.unpackb(as_previous(message.encode()))
    assert said == msgpack.unpackb(SAMPLES[kind]), "what it said comes back to it as it was"


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_message_that_it_had_is_still_there_with_all_that_it_understands(kind: str) -> None:
    sample = msgpack.unpackb(SAMPLES[kind])
    shape = shape_of({name: value for name, value in sample.items() if name not in ("kind", "v")})
    assert unknown_in(understood()[kind], shape) == [], "the sample lacks a field, or the table has one too many"


def test_what_was_added_since_is_left_out_for_it() -> None:
    relay = RelayRef(node_id=NodeId("n"), incarnation=Incarnation("i"), address="a:1")
    staged = StagedKv(relay=relay, tokens=4, model_fingerprint="f", kv_form="x")
    request = RouteRequest(
        request_id=RequestId("r"), model="m", isl_tokens=4, max_osl_tokens=1, staged=staged, tenant="t"
    )
    said = msgpack.unpackb(as_previous(request.encode()))
    assert said == {
        "kind": "route_request",
        "v": PREVIOUS,
        "request_id": "r",
        "model": "m",
        "isl_tokens": 4,
        "max_osl_tokens": 1,
        "exclude": [],
    }
    submit = SubmitPrefill(
        request_id=RequestId("r"),
        generation=Generation(1),
        incarnation=Incarnation("i"),
        transfer_id=TransferId("t"),
        events_subject="e",
        token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        deadline_s=1.0,
        retain_s=60.0,
    )
    assert "retain_s" not in msgpack.unpackb(as_previous(submit.encode()))
    assert SubmitPrefill.decode(as_previous(submit.encode())).retain_s == 0.0


@pytest.mark.parametrize("data", [b"", b'{"model": "m"}', packed(kind="ack", v=PREVIOUS), packed(model="m"), b"\xc1"])
def test_what_is_no_message_of_ours_is_left_alone(data: bytes) -> None:
    assert as_previous(data) == data


def test_the_own_version_is_read_strictly() -> None:
    with pytest.raises(ProtocolViolation, match="extra"):
        Ack.decode(packed(kind="ack", v=VERSION, extra=1))


def test_a_later_release_that_only_added_is_read_and_its_additions_ignored() -> None:
    worker = {"worker_id": "w", "incarnation": "i", "node_id": "n", "colour": "red"}
    event = {"request_id": "r", "generation": 1, "output_index": 0, "token_ids": [7], "mood": {"deep": 1}}
    data = packed(kind="step_events", v=VERSION + 1, min=VERSION, worker=worker, events=[event], new=[1])
    assert read_steps(data) is None, "the short way leaves it to the long one"
    steps = StepEvents.decode(data)
    assert steps.events[0].token_ids == (7,)
    assert steps.worker.worker_id == WorkerId("w")


@pytest.mark.parametrize(
    ("version", "least"),
    [
        (VERSION + 1, None),
        (VERSION + 1, VERSION + 1),
        (PREVIOUS - 1, None),
        (VERSION, PREVIOUS),
        ("2", None),
        (None, None),
        (True, None),
        (VERSION + 1, "1"),
    ],
)
def test_any_other_version_is_refused_and_the_way_to_upgrade_is_named(version: Any, least: Any) -> None:
    fields = {"kind": "ack", "v": version} | ({} if least is None else {"min": least})
    with pytest.raises(ProtocolViolation, match="ISTHMUS_WIRE_VERSION"):
        Ack.decode(packed(**fields))
