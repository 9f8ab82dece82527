"""The lease's record in a JetStream key-value bucket, asked for by request and reply over the bus.

A bucket that the bus has lost is made anew with revisions that begin at the wall clock's milliseconds: one that was
seen in the lost bucket is never met again, or a write over it could pass for one over its successor.

The bucket is an ordinary one (`nats kv get isthmus_planner leader` shows it). Reads go to the stream's leader; writes
name the revision that they replace, so the server refuses all but one.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import Any, Protocol

from isthmus_planner.leader.lease import Record, Write
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import IsthmusError, ProtocolViolation, Unavailable

BUCKET = "isthmus_planner"
KEY = "leader"
STREAM = f"KV_{BUCKET}"
SUBJECT = f"$KV.{BUCKET}.{KEY}"
CREATE = f"$JS.API.STREAM.CREATE.{STREAM}"
GET = f"$JS.API.STREAM.MSG.GET.{STREAM}"

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE = 10071
NO_MESSAGE = 10037
NO_STREAM = 10059
NAME_IN_USE = 10058
"""The stream is there, with other settings: an operator's, which will do."""
MAX_BYTES = 64 * 1024
"""One record of some 150 bytes; a bucket of another's making could hold more."""


class LeaseStore(Protocol):
    """Each raises `Unavailable`, `DeadlineExceeded` or another `IsthmusError` when it can't say."""

    async def open(self, *, timeout_s: float) -> None:
        """Make the bucket if there is none. Its revisions begin above those of any that was there before."""
        ...

    async def read(self, *, timeout_s: float) -> Record: ...

    async def write(self, write: Write, *, timeout_s: float) -> int | None:
        """The new revision; None: refused, the record is another by now."""
        ...


class JetStreamStore:
    """`replicas`: of the bucket, over as many servers of a NATS cluster; 3 outlive the loss of one."""

    def __init__(self, bus: Bus, *, replicas: int = 1) -> None:
        self._bus, self._replicas = bus, replicas

    async def open(self, *, timeout_s: float) -> None:
        settings = {
            "name": STREAM,
            "subjects": [f"$KV.{BUCKET}.>"],
            "max_msgs_per_subject": 1,
            "max_bytes": MAX_BYTES,
            "discard": "new",
            "storage": "file",
            "num_replicas": self._replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "first_seq": int(time.time() * 1000),
        }
        answer = await self._call(CREATE, settings, timeout_s)
        if _code(answer) not in (None, NAME_IN_USE):
            raise _refused("make", answer)

    async def read(self, *, timeout_s: float) -> Record:
        answer = await self._call(GET, {"last_by_subj": SUBJECT}, timeout_s)
        code = _code(answer)
        if code == NO_MESSAGE:
            return Record()
        if code is not None:
            raise _refused("read", answer)
        try:
            message = answer["message"]
            fields = json.loads(base64.b64decode(message["data"], validate=True)) if message.get("data") else {}
            return Record(
                revision=int(message["seq"]),
                holder=str(fields.get("holder", "")),
                epoch=int(fields.get("epoch", 0)),
                write=int(fields.get("write", 0)),
                released=bool(fields.get("released", not fields)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
            raise ProtocolViolation("the lease's record makes no sense", why=str(error), todo=_DELETE) from error

    async def write(self, write: Write, *, timeout_s: float) -> int | None:
        record = write.record
        fields: dict[str, Any] = {"holder": record.holder, "epoch": record.epoch, "write": record.write}
        if record.released:
            fields["released"] = True
        headers = {EXPECTED: str(write.over)}
        data = json.dumps(fields).encode()
        reply = await self._bus.request(SUBJECT, data, timeout_s=timeout_s, headers=headers)
        answer = _parsed(reply.data)
        code = _code(answer)
        if code == WRONG_LAST_SEQUENCE:
            return None
        if code is not None:
            raise _refused("write", answer)
        return int(answer["seq"])

    async def _call(self, subject: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        reply = await self._bus.request(subject, json.dumps(body).encode(), timeout_s=timeout_s)
        return _parsed(reply.data)


_DELETE = f"delete it: nats kv del {BUCKET} {KEY}"


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise ProtocolViolation("JetStream's answer is no JSON", why=str(error)) from error
    if not isinstance(answer, dict):
        raise ProtocolViolation("JetStream's answer is no JSON object")
    return answer


def _code(answer: dict[str, Any]) -> int | None:
    """JetStream's own code of an error; None if there is none."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return None
    return int(error.get("err_code") or error.get("code") or 0)


def _refused(what: str, answer: dict[str, Any]) -> IsthmusError:
    why = str(answer["error"].get("description", answer["error"]))
    todo = "give the NATS server JetStream, and the planner's user the right to it"
    return Unavailable(f"could not {what} the leader's lease in bucket {BUCKET!r}", why=why, todo=todo)
