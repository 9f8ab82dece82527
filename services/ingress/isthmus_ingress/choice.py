"""One choice of an answer: its tokens become text, until a stop string, the limit or the model ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus_ingress.detokenize import Detokenizer, JsonTexts, StopScanner, json_text
from isthmus_ingress.harmony import HarmonyParser, Part
from isthmus_ingress.saga_types import Deliver
from isthmus_shared.messages.work import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added to the answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    offsets: tuple[int, ...]
    """Where each token's text begins, in characters of the answer's text."""
    stopped: bool
    """A stop string was found: nothing follows."""
    reasoning: str = ""
    """What a model that answers on channels thought aloud; no part of `text`."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Texts of tokens that came at once, each as the inside of a JSON string; empty ones are left out."""

    texts: list[bytes]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Channels:
    parser: HarmonyParser
    reasoning: Detokenizer


@dataclass(slots=True)
class Choice:
    index: int
    prompt: int
    """Which of the request's prompts it answers."""
    detokenizer: Detokenizer
    scanner: StopScanner
    silent_ids: frozenset[int]
    """Stop token ids: they end the answer and are no text of it."""
    channels: Channels | None = None
    """Of a model that answers on channels."""
    tokens: int = 0
    chars: int = 0
    """Text so far, held back or not."""
    finish: str | None = None
    began: bool = False
    """Its first chunk was written."""
    _last: str = field(default="")

    def take(self, deliver: Deliver) -> Piece:
        texts: list[str] = []
        offsets: list[int] = []
        stopped = False
        thought = ""
        for token_id in deliver.token_ids:
            offsets.append(self.chars)
            part = Part.CONTENT if self.channels is None else self.channels.parser.push(token_id)
            if self.channels is not None and part is Part.REASONING:
                thought += self.channels.reasoning.push(token_id)
            silent = part is not Part.CONTENT or token_id in self.silent_ids
            text = "" if silent else self.detokenizer.push(token_id)
            self.chars += len(text)
            shown, stopped = self.scanner.push(text)
            texts.append(shown)
            if stopped:
                self.finish = "stop"
                break
        count = len(texts)
        self.tokens += count
        logprobs = deliver.logprobs[:count] if deliver.logprobs is not None else None
        return Piece("".join(texts), deliver.token_ids[:count], logprobs, tuple(offsets), stopped, thought)

    @property
    def simple(self) -> bool:
        """Whether its text is its tokens' texts, one after the other."""
        return self.channels is None and not self.silent_ids and self.scanner.idle

    def burst(self, token_ids: list[int], texts: JsonTexts) -> Burst:
        """Of a `simple` choice; its `chars` are not counted."""
        detokenizer = self.detokenizer
        said: list[bytes] = []
        for token_id in token_ids:
            text = texts.get(token_id) if detokenizer.whole else None
            if text is None:
                text = json_text(detokenizer.push(token_id))
            if text:
                said.append(text)
        self.tokens += len(token_ids)
        return Burst(said, token_ids)

    def end(self, finish: FinishReason) -> str:
        """The text that was held back, now that no more comes; sets `finish` (a stop string in it counts)."""
        shown, found = self.scanner.push(self.detokenizer.flush())
        self.finish = "stop" if found or finish is FinishReason.STOP else "length"
        return shown if found else shown + self.scanner.flush()


def clip_offsets(offsets: Sequence[int], chars: int) -> tuple[int, ...]:
    """Offsets of tokens within a text that a stop string has cut short."""
    return tuple(min(offset, chars) for offset in offsets)
