"""Child processes of a measurement: one JSON object a line over a socket of their own, and the CPU they have used."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 180.0
"""The longest series of one workload, and some."""
END_TIMEOUT_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Message = dict[str, Any]


class ChildFailed(Exception):
    """A child ended or did not answer; a measurement has no use for half an answer."""


class Child:
    """Runs ``python -m MODULE --fd N ARGS`` with the parent's interpreter and environment."""

    def __init__(self, module: str, *args: str, environ: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        command = [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *args]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._name, self._socket, self._file = module, ours, ours.makefile("rb")

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> Message:
        try:
            line = self._file.readline()
        except TimeoutError as error:
            raise ChildFailed(f"{self._name} did not answer within {ANSWER_TIMEOUT_S} s") from error
        if not line:
            raise ChildFailed(f"{self._name} ended with status {self._process.wait(END_TIMEOUT_S)}")
        answer: Message = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self._name}: {answer['error']}")
        return answer

    def tell(self, **question: Any) -> None:
        """Its `answer` comes when it is asked for."""
        self._socket.sendall(json.dumps(question).encode() + b"\n")

    def ask(self, **question: Any) -> Message:
        self.tell(**question)
        return self.answer()

    def cpu_s(self) -> float:
        """User and system time so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def close(self) -> None:
        """It ends when its socket closes; a second chance is not given."""
        self._file.close()
        self._socket.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(fd: int, handle: Callable[[Message], Message], *, first: Message) -> None:
    """A child's loop: says `first`, then answers questions until the parent closes."""
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as stream:
        _say(stream, first)
        for line in stream:
            _say(stream, handle(json.loads(line)))


def _say(stream: Any, message: Message) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()
