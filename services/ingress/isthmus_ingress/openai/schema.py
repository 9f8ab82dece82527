"""Request models of the two generating endpoints, as OpenAI documents them, with vLLM's sampling extensions.

Three kinds of field beside those that are implemented: harmless ones (`HARMLESS`: accepted and without effect here),
neutral ones (`NEUTRAL`: accepted only with the value that asks for nothing), and all others: a 400 that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from isthmus_ingress.openai.errors import BODY
from isthmus_shared.errors import InvalidRequest
from isthmus_shared.messages.work import MAX_COUNT, MAX_SALT_CHARS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of one stop string: as much text may be held back from the client."""
MAX_CHOICES = 16
"""`n`; a request of more is better sent as several."""
MAX_PROMPTS = 128
"""Prompts in one completions request."""
COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's (and vLLM's) default of /v1/completions."""

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Ask for nothing that changes the tokens: bookkeeping at OpenAI, or about tools (of which there are none)."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (),  # compared with n below
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Field → values (beside null) that ask for nothing."""

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
MAX_TOKEN_ID = 2**31
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI pads its chunks against traffic analysis; here chunks are never padded."""


class _Common(_Strict):
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=MAX_COUNT)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=MAX_COUNT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    slo_class: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @model_validator(mode="after")
    def _options_only_when_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def choices(self) -> int:
        return self.n or 1


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # What an SDK sends back of an earlier answer; anything but nothing is refused.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates know it: text parts joined, no empty fields."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
        kept = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": text} | {key: value for key, value in kept.items() if value is not None}


class ChatRequest(_Common):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=MAX_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Common):
    prompt: Any
    """Text, a list of texts, token ids, or a list of lists of token ids; see `prompts`."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> Any:
        """Checked by hand: a union would complain about every branch, none of which the caller knows."""
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt must be text, a list of texts, token ids or a list of these, and not empty")
        if isinstance(prompt[0], str):
            for place, text in enumerate(prompt):
                if not isinstance(text, str):
                    raise ValueError(f"prompt[{place}] must be text, as prompt[0] is")
        elif isinstance(prompt[0], list):
            for place, token_ids in enumerate(prompt):
                _check_token_ids(token_ids, f"prompt[{place}]")
        else:
            _check_token_ids(prompt, "prompt")
        return prompt

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"prompt holds more than {MAX_PROMPTS} prompts")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported: a prompt's logprobs are not computed")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids."""
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if "max_tokens" in self.model_fields_set else COMPLETIONS_MAX_TOKENS

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


def _check_token_ids(token_ids: Any, where: str) -> None:
    if not isinstance(token_ids, list) or not token_ids:
        raise ValueError(f"{where} must be a list of token ids, and not empty")
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKEN_ID:
            raise ValueError(f"{where}[{place}] must be a token id, got {_short(token_id)}")


RequestT = TypeVar("RequestT", bound=_Common)
AnyRequest = ChatRequest | CompletionRequest


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    return _parse(ChatRequest, body)


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    return _parse(CompletionRequest, body)


def _parse(model: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    kept = {name: value for name, value in body.items() if _is_ours(model, name, value, body)}
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _named(error) from None


def _is_ours(model: type[_Common], name: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Whether the model decides about a field. Raises for one that asks for what nobody here can do."""
    if name in model.model_fields:
        return True
    if name in HARMLESS or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
        return False
    if name == "best_of" and value == (body.get("n") or 1):
        return False
    if name in NEUTRAL:
        raise InvalidRequest(f"{name} is not supported", why=f"the value given is {_short(value)}", param=name)
    raise InvalidRequest(f"Unrecognized request argument supplied: {name[:64]!r}", param=name[:64] or BODY)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _named(error: ValidationError) -> InvalidRequest:
    """The most telling of pydantic's complaints, with its field in OpenAI's notation (`messages[0].content`)."""
    # In a union every branch complains. The deepest place is in the branch that was meant; at one depth, a complaint
    # about the value tells more than one about the type.
    first = max(
        error.errors(include_url=False),
        key=lambda item: (len(_path(item["loc"])), not item["type"].endswith(("_type", "_parsing"))),
    )
    path = _path(first["loc"])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    message = str(first["msg"]).removeprefix("Value error, ")
    if not where:  # a rule about several fields: its text begins with the first one's name
        where = message.split()[0]
        return InvalidRequest(message, param=where)
    if first["type"] == "value_error":  # our own text, which names the field
        return InvalidRequest(message, param=where)
    if first["type"] == "missing":
        return InvalidRequest(f"you must provide {where}", param=where)
    return InvalidRequest(f"{where} is invalid", why=f"{message}, got {_short(first['input'])}", param=where)


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A location without the names that pydantic gives to a union's branches (`str`, `list[TextPart]`, …)."""
    return tuple(part for part in loc if isinstance(part, int) or not _is_branch(part))


def _is_branch(part: str) -> bool:
    return part in ("str", "constrained-str") or part.startswith(("list[", "function-"))
