"""Token bytes to text, one token at a time: never half a character, never a part of a stop string."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence

_json_string = json.encoder.encode_basestring


class Detokenizer:
    """Joins tokens' bytes and gives whole characters; bytes that can't be UTF-8 become U+FFFD, as a decoder at the
    end of the text would make them. Holds at most 3 bytes back."""

    __slots__ = ("_decoder", "_token_bytes", "whole")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.whole = True
        """Nothing is held back: the next token's text is its own."""

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._token_bytes(token_id))
        self.whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """What is left at the end: the beginning of a character whose rest never came, as U+FFFD."""
        self.whole = True
        return self._decoder.decode(b"", True)


def json_text(text: str) -> bytes:
    """What stands between the quotes of a JSON string that says it."""
    return _json_string(text)[1:-1].encode()


class JsonTexts:
    """`json_text` of each token that is whole characters by itself, made when it first comes; bounded by the
    vocabulary."""

    __slots__ = ("_known", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._known: dict[int, bytes | None] = {}

    def get(self, token_id: int) -> bytes | None:
        """None for one that holds a part of a character: its text depends on those before it."""
        try:
            return self._known[token_id]
        except KeyError:
            return self._make(token_id)

    def __len__(self) -> int:
        return len(self._known)

    def _make(self, token_id: int) -> bytes | None:
        data = self._token_bytes(token_id)
        if not data:  # special, or outside the vocabulary, whose ids have no bound
            return b""
        try:
            text = json_text(data.decode("utf-8"))
        except UnicodeDecodeError:
            self._known[token_id] = None
            return None
        self._known[token_id] = text
        return text


class StopScanner:
    """Finds the first stop string in a growing text, and holds back what could be the beginning of one.

    `held` never exceeds the longest stop less one character.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    @property
    def idle(self) -> bool:
        """There is nothing to look for."""
        return not self._stops

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
