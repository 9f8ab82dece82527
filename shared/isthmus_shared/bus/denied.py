"""What the bus' server has told us that we may not do. It tells later than it is asked, so that is kept by subject."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from isthmus_shared.bus.refusals import forbidden

MAX_SUBJECTS = 1024
"""Remembered of either kind; beyond, a refusal is still logged."""
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)


class Denied:
    """Of one connection. Subjects are compared without case, since nats-py hands errors on in lower case."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._publishing: set[str] = set()
        self._hearing: set[str] = set()
        self.asking: dict[asyncio.Future[Any], str] = {}
        """Who waits for an answer, and on which subject it asked."""

    def take(self, error: str) -> bool:
        """Whether that error is of this kind. Whoever waits for an answer from that subject gets `BusForbidden`."""
        found = _VIOLATION.search(error)
        if found is None:
            return False
        subject = found[2].lower()
        known = self._publishing if found[1].lower() == "publish" else self._hearing
        if len(known) < MAX_SUBJECTS:
            known.add(subject)
        if known is self._publishing:
            for answer, asked in self.asking.items():
                if asked.lower() == subject and not answer.done():
                    answer.set_exception(forbidden("say", found[2], self._user))
        return True

    def publishing(self, subject: str) -> bool:
        return bool(self._publishing) and subject.lower() in self._publishing

    def hearing(self, subject: str) -> bool:
        return bool(self._hearing) and subject.lower() in self._hearing

    def clear(self) -> None:
        """A new connection: the server's configuration may be another."""
        self._publishing.clear()
        self._hearing.clear()
