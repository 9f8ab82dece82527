"""Token bytes to text, one token at a time: never half a character, never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Joins tokens' bytes and gives whole characters; bytes that can't be UTF-8 become U+FFFD, as a decoder at the
    end of the text would make them. Holds at most 3 bytes back."""

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: the beginning of a character whose rest never came, as U+FFFD."""
        return self._decode(b"", True)


class StopScanner:
    """Finds the first stop string in a growing text, and holds back what could be the beginning of one.

    `held` never exceeds the longest stop less one character.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was found). Nothing of the stop is ever shown."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._beginning_at_the_end(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning_at_the_end(self, text: str) -> int:
        """Length of the longest suffix that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
