"""What the operator gave, as arguments of vLLM's engine. Knows vLLM's names, but not vLLM."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.errors import ConfigInvalid

SETTING = "ISTHMUS_ENGINE_VLLM_ARGS"
_TODO = """write it as '{"dtype": "bfloat16", "max_num_seqs": 64}' or '--dtype bfloat16 --max-num-seqs 64'"""

OURS = {
    "model": "ISTHMUS_ENGINE_MODEL names it",
    "kv_transfer_config": "the worker connects vLLM to its node's relay itself",
    "skip_tokenizer_init": "token ids travel, never text",
    "distributed_executor_backend": "vLLM runs inside the worker's process",
    "worker_cls": "vLLM runs inside the worker's process",
    "async_scheduling": "a step's output must be known before the next begins",
    "disable_log_stats": "vLLM's metrics are part of the worker's",
    "logits_processors": "the worker samples by (seed, output index), so that a sequence may move",
}
ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
"""Behind a worker vLLM is one process on one accelerator; with more, serve with `vllm serve` and the connector."""

_SETTINGS = {
    "kv_cache_bytes": "kv_cache_memory_bytes",
    "max_batch": "max_num_seqs",
    "max_model_len_tokens": "max_model_len",
    "prefix_cache": "enable_prefix_caching",
}
"""The worker's own settings, passed on where they were given; else vLLM's defaults hold."""


def engine_arguments(config: EngineConfig, known: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments for vLLM's `EngineArgs`, whose fields are `known`.

    Raises `ConfigInvalid`: not a form that can be read, a name that vLLM does not know, or one that is not the
    operator's to set.
    """
    given = parse(config.vllm_args)
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help`"
            raise _refuse(f"vLLM has no engine argument {name!r}", hint)
        if name in OURS:
            raise _refuse(f"{name} is not yours to set", OURS[name])
    for name in ONE:
        if given.get(name, 1) != 1:
            why = "vLLM runs inside the worker's process, on one accelerator"
            todo = "for several, run `vllm serve` with the Isthmus connector (docs/vllm.md)"
            raise ConfigInvalid(f"{SETTING}: {name} is {given[name]!r}", why=why, todo=todo, param="vllm_args")
    fields = config.model_fields_set
    own = {theirs: getattr(config, ours) for ours, theirs in _SETTINGS.items() if ours in fields}
    own = {name: value for name, value in own.items() if value is not None}
    if "prefill_chunk_tokens" in fields:
        own |= _chunk(config.prefill_chunk_tokens, config.max_batch)
    if "kv_blocks" in fields and config.kv_blocks is not None:
        # One block of vLLM's is nobody's; with the number given, its guess from the free memory is not wanted.
        own |= {"num_gpu_blocks_override": config.kv_blocks + 1, "kv_cache_memory_bytes": config.kv_cache_bytes}
    twice = sorted(own.keys() & given.keys())
    if twice:
        raise _refuse(f"{twice[0]} is set twice", "the worker has a setting of its own for it")
    return own | given


def _chunk(chunk_tokens: int, max_batch: int) -> dict[str, int]:
    """vLLM's budget of a step counts decoding sequences too, and must hold a token of each."""
    if chunk_tokens >= max_batch:
        return {"max_num_seqs": max_batch, "max_num_batched_tokens": chunk_tokens}
    return {
        "max_num_seqs": max_batch,
        "max_num_batched_tokens": max_batch,
        "long_prefill_token_threshold": chunk_tokens,
    }


def parse(text: str) -> dict[str, Any]:
    """A JSON object, or the form of a command line. Names with underscores."""
    text = text.strip()
    if not text:
        return {}
    if text.startswith("{"):
        try:
            fields: Any = json.loads(text)
        except ValueError as error:
            raise _refuse("it is not JSON", str(error)) from error
        return _underscored(fields)
    if not text.startswith("--"):
        raise _refuse(f"{text[:40]!r} is neither a JSON object nor a list of --options", _TODO)
    return _options(text)


def _options(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _refuse("its quotes do not match", str(error)) from error
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            negated = name.startswith("no_") and not equals
            name = name.removeprefix("no_") if negated else name
            if not name or name in found:
                raise _refuse(f"the option {word!r} is empty or given twice", _TODO)
            found[name] = _value(value) if equals else not negated
        elif found and found[name] is True:
            found[name] = _value(word)
        else:
            raise _refuse(f"{word!r} belongs to no option", _TODO)
    return found


def _value(text: str) -> Any:
    """As JSON if it is that (numbers, true, objects), else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _underscored(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in fields.items()}


def _refuse(what: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"{SETTING}: {what}", why=why, todo=_TODO if why != _TODO else "", param="vllm_args")
