"""gpt-oss' output format, harmony: messages on channels, told apart by special tokens. Parsed here, once, by token.

An answer goes on from ``<|start|>assistant``, with which its prompt ends:

    <|channel|>analysis<|message|>The user says…<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>

`final` is what the user is to read, and so is `commentary` that is addressed to nobody; the rest is reasoning.
The prompt is rendered by the model's own chat template, which writes the same format.
(Source: OpenAI, "OpenAI harmony response format".)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

MODEL_TYPES = frozenset({"gpt_oss"})
MAX_HEADER_BYTES = 4096
"""Of a message, before its body; a channel and a recipient take fifty. Beyond it the model has lost the format."""


@dataclass(frozen=True, slots=True)
class HarmonyMarkers:
    """Token ids."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]
    """end, return, call"""


class Part(Enum):
    CONTENT = auto()
    REASONING = auto()
    MARKUP = auto()
    """Markers and headers: no text of the answer."""


class HarmonyParser:
    """Of one answer. `push` says of each token what it is part of."""

    __slots__ = ("_body", "_header", "_markers", "_token_bytes")

    def __init__(self, markers: HarmonyMarkers, token_bytes: Callable[[int], bytes]) -> None:
        self._markers, self._token_bytes = markers, token_bytes
        self._header: bytearray | None = bytearray()
        self._body = Part.CONTENT

    def push(self, token_id: int) -> Part:
        markers = self._markers
        if token_id in markers.ends:
            self._header = bytearray()  # a model that goes on without a marker is taken at its next one
            return Part.MARKUP
        if token_id == markers.start:
            self._header = bytearray()
            return Part.MARKUP
        if self._header is None:
            return self._body
        if token_id == markers.message:
            self._body, self._header = part_of(self._header.decode("utf-8", errors="replace")), None
        else:
            if token_id == markers.channel:
                self._header.clear()  # what came before is the role
            self._header += self._token_bytes(token_id)
            if len(self._header) > MAX_HEADER_BYTES:
                self._body, self._header = Part.CONTENT, None
        return Part.MARKUP


def part_of(header: str) -> Part:
    """Of ``<|channel|>commentary to=functions.f <|constrain|>json``: what its message is part of."""
    if "<|channel|>" not in header:
        return Part.CONTENT
    words = header.partition("<|channel|>")[2].replace("<|constrain|>", " ").split()
    addressed = any(word.startswith("to=") for word in words)
    channel = words[0] if words else ""
    if channel == "final" or (channel == "commentary" and not addressed):
        return Part.CONTENT
    return Part.REASONING


def find_markers(folder: Path, token_id: Callable[[str], int | None]) -> HarmonyMarkers | None:
    """Those of the model in that folder, if it speaks harmony."""
    try:
        fields = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or fields.get("model_type") not in MODEL_TYPES:
        return None
    names = ("start", "channel", "message", "end", "return", "call")
    start, channel, message, *ends = (token_id(f"<|{name}|>") for name in names)
    if start is None or channel is None or message is None:
        return None  # a tokenizer of another kind: there is nothing to parse by
    return HarmonyMarkers(start, channel, message, frozenset(end for end in ends if end is not None))
