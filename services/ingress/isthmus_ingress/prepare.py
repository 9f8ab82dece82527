"""From a parsed request to token ids and sampling parameters: once, at the edge."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from isthmus_ingress.openai.schema import AnyRequest, ChatRequest, CompletionRequest, parse_chat, parse_completion
from isthmus_ingress.roster import Model
from isthmus_ingress.slo import SloClasses
from isthmus_ingress.tenants import ANYONE, Tenant
from isthmus_ingress.text import ModelText
from isthmus_shared.errors import ContextTooLong, InvalidRequest
from isthmus_shared.messages.route import Slo
from isthmus_shared.messages.work import SamplingParams

INLINE_TEXT_CHARS = 16_384
"""Longer texts are tokenized on another thread: this many cost the event loop about 3 ms."""
SEED_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str
    """What `echo` shows; empty when it was not asked for."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that could be served. One choice per (prompt, k < n), prompts first."""

    chat: bool
    model: Model
    prompts: tuple[Prompt, ...]
    sampling: tuple[SamplingParams, ...]
    """One per prompt and choice, in the order of the answer's choices."""
    choices_per_prompt: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    top_logprobs: int | None
    tenant: Tenant = ANYONE
    slo: Slo | None = None
    """Of its class."""
    cache_salt: str = ""
    """Prefixes are shared between requests of one salt only."""

    @property
    def plain(self) -> bool:
        """The answer says nothing of its tokens but their text."""
        return self.top_logprobs is None and not self.return_token_ids

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class Preparer:
    """Knows the models' text; tokenizes long prompts on `executor` (which its owner shuts down). `text` is that of
    every model that is not among `others`."""

    def __init__(
        self,
        text: ModelText,
        executor: Executor,
        others: Mapping[str, ModelText] | None = None,
        classes: SloClasses | None = None,
    ) -> None:
        self._text, self._executor, self._others = text, executor, dict(others or {})
        self._classes = SloClasses() if classes is None else classes

    def text(self, model_name: str) -> ModelText:
        return self._others.get(model_name, self._text)

    async def chat(self, body: Mapping[str, Any], model: Model, tenant: Tenant) -> Prepared:
        request = parse_chat(body)
        return self._prepared(request, model, (Prompt(await self._render(request, model), ""),), tenant)

    async def _render(self, request: ChatRequest, model: Model) -> tuple[int, ...]:
        template = self.text(model.name).chat_template
        if template is None:
            why = "its folder holds no chat template"
            raise InvalidRequest("this model does not chat", why=why, todo="use /v1/completions", param="messages")
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            options["add_generation_prompt"] = request.add_generation_prompt
        said = template.render([message.as_template_input() for message in request.messages], options)
        return await self._encode(said, model, special=False, param="messages")

    async def tokenize(self, body: Mapping[str, Any], model: Model) -> tuple[int, ...]:
        """Token ids of a chat's `messages` or of one `prompt`."""
        if "messages" in body:
            return await self._render(parse_chat(body), model)
        request = parse_completion(body)
        return (await self._prompt(request.prompts[0], request, model)).token_ids

    async def completion(self, body: Mapping[str, Any], model: Model, tenant: Tenant) -> Prepared:
        request = parse_completion(body)
        prompts = [await self._prompt(prompt, request, model) for prompt in request.prompts]
        return self._prepared(request, model, tuple(prompts), tenant)

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest, model: Model) -> Prompt:
        tokenizer = self.text(model.name).tokenizer
        if isinstance(prompt, str):
            token_ids = await self._encode(prompt, model, special=True, param="prompt")
            return Prompt(token_ids, prompt if request.echo else "")
        unknown = next((token for token in prompt if token >= tokenizer.vocab_size), None)
        if unknown is not None:
            why = f"the vocabulary ends at {tokenizer.vocab_size - 1}"
            raise InvalidRequest(
                f"prompt holds token id {unknown}, which the model does not know", why=why, param="prompt"
            )
        return Prompt(tuple(prompt), tokenizer.decode(prompt) if request.echo else "")

    async def _encode(self, text: str, model: Model, *, special: bool, param: str) -> tuple[int, ...]:
        tokenizer = self.text(model.name).tokenizer
        if len(text) <= INLINE_TEXT_CHARS:
            token_ids = tokenizer.encode(text, special=special)
        else:
            loop = asyncio.get_running_loop()
            token_ids = await loop.run_in_executor(self._executor, lambda: tokenizer.encode(text, special=special))
        if not token_ids:
            raise InvalidRequest(f"{param} holds no token", param=param)
        return token_ids

    def _prepared(self, request: AnyRequest, model: Model, prompts: tuple[Prompt, ...], tenant: Tenant) -> Prepared:
        options = request.stream_options
        seed = secrets.randbelow(SEED_RANGE) if request.seed is None else request.seed % SEED_RANGE
        sampling = [
            _sampling(request, model, len(prompt.token_ids), derived_seed(seed, place))
            for prompt in prompts
            for place in range(request.choices)
        ]
        return Prepared(
            chat=isinstance(request, ChatRequest),
            model=model,
            prompts=prompts,
            sampling=tuple(sampling),
            choices_per_prompt=request.choices,
            stops=request.stops,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
            top_logprobs=request.wanted_logprobs,
            tenant=tenant,
            cache_salt=tenant.salt_with(request.cache_salt),
            slo=self._classes.of(request.slo_class or "", tenant.slo_class, keyed=tenant is not ANYONE),
        )


def derived_seed(seed: int, place: int) -> int:
    """The seed of choice `place`: the first one's is the request's own, so that n changes nothing about it."""
    if place == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest(), "big")


def _sampling(request: AnyRequest, model: Model, prompt_tokens: int, seed: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=_max_tokens(request, model, prompt_tokens),
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=given(request.min_p, 0.0),
        seed=seed,
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.wanted_logprobs,
    )


def _max_tokens(request: AnyRequest, model: Model, prompt_tokens: int) -> int:
    """Tokens of output. What the client asked for must fit; what it left open is what fits."""
    limit = model.max_model_len_tokens
    chat = isinstance(request, ChatRequest)
    field = "messages" if chat else "prompt"
    room = limit - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens",
            why=f"your {field} has {prompt_tokens}, and the answer needs one at least",
            todo=f"shorten {field}",
            param=field,
        )
    wanted = request.wanted_tokens
    named = (
        "max_completion_tokens" if isinstance(request, ChatRequest) and request.max_completion_tokens else "max_tokens"
    )
    if wanted is None:
        return room
    if wanted > room and named in request.model_fields_set:
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens",
            why=f"you asked for {prompt_tokens + wanted}: {prompt_tokens} in {field} and {named} = {wanted}",
            todo=f"ask for at most {room} or shorten {field}",
            param=named,
        )
    return min(wanted, room)
