"""Text to tokens and back, and the chat template: what a model's folder says about text.

Reads `tokenizer.json` (required), `tokenizer_config.json` and `chat_template.jinja` (optional) of a Hugging Face
folder. Pure after `load`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from isthmus_ingress.detokenize import Detokenizer, JsonTexts
from isthmus_ingress.harmony import HarmonyMarkers, find_markers
from isthmus_shared.errors import ConfigInvalid, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def byte_level_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet (GPT-2's): printable Latin-1 stands for itself, the other 68 bytes for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class Tokenizer:
    """Encodes text, and knows each token's bytes."""

    def __init__(self, inner: tokenizers.Tokenizer, *, source: str) -> None:
        self._inner = inner
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        kinds = _decoder_kinds(json.loads(inner.to_str()).get("decoder"))
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        verbatim = {i: token.content.encode() for i, token in added.items()}
        if "ByteLevel" in kinds:
            alphabet = byte_level_alphabet()
            self._bytes = self._table(verbatim, lambda piece: bytes(alphabet[c] for c in piece))
        elif kinds & {"Metaspace", "ByteFallback"}:
            self._bytes = self._table(verbatim, _sentencepiece_bytes)
        else:
            kind = ", ".join(sorted(kinds)) or "none"
            raise ConfigInvalid(
                f"{source}: the tokenizer's decoder ({kind}) is of a kind that Isthmus can't stream",
                todo="use a model with a byte-level or a sentencepiece tokenizer",
            )

    def _table(self, verbatim: Mapping[int, bytes], to_bytes: Any) -> list[bytes]:
        table = [b""] * self.vocab_size
        for piece, token_id in self._inner.get_vocab(with_added_tokens=True).items():
            if token_id >= len(table):
                table.extend([b""] * (token_id + 1 - len(table)))
            table[token_id] = verbatim[token_id] if token_id in verbatim else to_bytes(piece)
        return table

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids; `special` adds what the tokenizer puts around a text (such as a beginning-of-sequence token)."""
        return tuple(self._inner.encode(text, add_special_tokens=special).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of any token, special ones included; empty for an id outside the vocabulary (a padded one)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def shown_bytes(self, token_id: int) -> bytes:
        """Bytes that a reader sees: nothing for a special token."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    @cached_property
    def json_texts(self) -> JsonTexts:
        """What readers see of each token, for answers that are written as JSON."""
        return JsonTexts(self.shown_bytes)

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        return Detokenizer(self.token_bytes if special else self.shown_bytes)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        joined = b"".join(map(self.token_bytes if special else self.shown_bytes, token_ids))
        return joined.decode("utf-8", errors="replace")


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of the steps in a tokenizer.json's decoder."""
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))} - {"Sequence"}
    for step in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(step)
    return kinds


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


class ChatTemplate:
    """The model's own Jinja template, in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError) as error:
            raise ConfigInvalid("the model's chat template does not parse", why=str(error)) from error

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt's text. Raises `InvalidRequest` with the template's own words when it refuses the messages."""
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._special, **options}
        try:
            return self._template.render({**values, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                "the model's chat template refused the messages", why=str(error), param="messages"
            ) from error


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


@dataclass(frozen=True, slots=True)
class ModelText:
    """All that the ingress knows of a model's text."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    harmony: HarmonyMarkers | None = None
    """Of a model that answers on channels (gpt-oss)."""


def find_tokenizer(folder: Path) -> Path:
    """Its file in a model's folder. Raises `ConfigInvalid`."""
    path, todo = folder / "tokenizer.json", "set ISTHMUS_INGRESS_MODEL to a Hugging Face model folder"
    try:
        if not path.is_file():
            raise ConfigInvalid(f"{path} does not exist", todo=todo)
        path.open("rb").close()
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read", why=error.strerror or str(error), todo=todo) from None
    return path


def load_model_text(folder: Path) -> ModelText:
    """Read a model's folder. Raises `ConfigInvalid` that names the file."""
    path = find_tokenizer(folder)
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ConfigInvalid(f"{path} is not a tokenizer", why=str(error)) from error
    config = _read_json(folder / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
    source = _template_source(folder, config)
    template = ChatTemplate(source, special) if source is not None else None
    return ModelText(Tokenizer(inner, source=str(path)), template, find_markers(folder, inner.token_to_id))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigInvalid(f"{path} is not JSON", why=str(error)) from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """A special token's text: given as a string, or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the chat's
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
