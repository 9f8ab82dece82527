"""vLLM's engine inside this process, one step at a time. Everything here runs in the engine's own thread.

Uses vLLM's public `LLMEngine`; of its insides only the scheduler's requests and block pool, for what only they know:
which requests have let go of their blocks, how much is free, and how far prompts have come.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.reference.fingerprint import model_fingerprint
from isthmus_shared.engines.reference.model_config import eos_token_ids
from isthmus_shared.engines.vllm.arguments import engine_arguments
from isthmus_shared.engines.vllm.flows import FlowTable
from isthmus_shared.engines.vllm.turns import SAMPLING_KEY, CoreInfo, NewRequest, Progress, TokenLine, Turn
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.messages.work import SamplingParams

CONNECTOR = "IsthmusConnector"
CONNECTOR_MODULE = "isthmus_kvrelay.client.vllm_connector"
WARM_UP_TOKENS = 16
WARM_UP_STEPS = 64
"""A prompt of 16 tokens and two more take three; beyond this many the engine does not work."""


@dataclass(frozen=True, slots=True)
class _Mark:
    request: Any
    computed: int
    preemptions: int


class VllmCore:
    """Made by `build`; `turn` until `close`."""

    def __init__(self, engine: Any, info: CoreInfo, flows: FlowTable) -> None:
        self._engine, self.info, self.flows = engine, info, flows
        self._inner = engine.engine_core.engine_core
        self._scheduler = self._inner.scheduler
        self._internal: dict[str, str] = {}
        """vLLM's name for each of our requests that it still holds."""
        self._loads: set[str] = set()
        """vLLM's names of those whose prompt is loaded, not computed."""
        self._preemptions = 0

    @classmethod
    def build(cls, config: EngineConfig) -> VllmCore:
        """Loads the model and warms up. Raises `ConfigInvalid`, with vLLM's own words where it refuses."""
        _set_surroundings(config.threads)
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.abstract import Executor

        flows = FlowTable()
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        arguments = engine_arguments(config, known)
        fingerprint = model_fingerprint(model_folder(config))
        try:
            built = EngineArgs(**arguments, **_own_arguments(config, fingerprint)).create_engine_config()
            engine = LLMEngine(built, Executor.get_class(built), log_stats=True, multiprocess_mode=False)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise ConfigInvalid(
                "vLLM does not start", why=" ".join(str(error).split()), todo="see its log", param="vllm_args"
            ) from error
        core = cls(engine, _info(engine, config, vllm.__version__), flows)
        core._attach()
        core._warm_up()
        return core

    def turn(self, new: Sequence[NewRequest], aborted: Sequence[str]) -> Turn:
        """Ends and takes in requests, then makes one step if there is anything to do.

        Raises what vLLM raises in a step; the engine is then of no more use.
        """
        self._abort(aborted)
        refused = [(one.name, why) for one in new if (why := self._add(one)) is not None]
        marks = self._marks()
        began_s = time.perf_counter()
        outputs = self._engine.step() if self._scheduler.has_requests() else []
        took_s = time.perf_counter() - began_s
        prefill_tokens, decode_sequences = self._advanced(marks)
        progress = tuple(self._progress(output) for output in outputs)
        return Turn(
            progress=progress,
            refused=tuple(refused),
            released=self._take_released(),
            took_s=took_s,
            prefill_tokens=prefill_tokens,
            decode_sequences=decode_sequences,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_free=self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            preemptions=self._preemptions,
            idle=not self._scheduler.has_requests(),
        )

    def close(self) -> None:
        """Frees the model and its cache, and what vLLM keeps for the whole process."""
        self._engine.engine_core.shutdown()

    # -- pieces

    def _attach(self) -> None:
        """The worker's side of the connector takes its flows from us."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().use_flows(self.flows)

    def _warm_up(self) -> None:
        """A prompt and two tokens, by the sampler and with logprobs: each imports what it needs when it first runs."""
        sampling = {"params": SamplingParams(max_tokens=2, top_p=0.9), "previous": (), "first_index": 0}
        params: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
        params |= {"extra_args": {SAMPLING_KEY: sampling}}
        turn = self.turn([NewRequest("warm-up", (0,) * WARM_UP_TOKENS, params)], [])
        for _ in range(WARM_UP_STEPS):
            if turn.idle:
                return
            turn = self.turn([], [])
        raise ConfigInvalid("vLLM does not come to the end of a prompt of 16 tokens", param="kind")

    def _add(self, request: NewRequest) -> str | None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        params = vllm.SamplingParams(**request.params, detokenize=False, output_kind=RequestOutputKind.DELTA)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(request.token_ids)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            self._internal[request.name] = self._engine.add_request(request.name, prompt, params)
        except (ValueError, TypeError) as error:  # vLLM's validation errors are ValueErrors
            return str(error)
        if request.loads:
            self._loads.add(self._internal[request.name])
        return None

    def _abort(self, names: Sequence[str]) -> None:
        internal = [self._internal[name] for name in names if name in self._internal]
        if internal:
            self._engine.abort_request(internal, internal=True)

    def _take_released(self) -> frozenset[str]:
        requests = self._scheduler.requests
        released = frozenset(name for name, internal in self._internal.items() if internal not in requests)
        for name in released:
            self._loads.discard(self._internal.pop(name))
        return released

    def _marks(self) -> list[_Mark]:
        """Where every request stands before a step. Its object stays readable when the step ends it."""
        return [_Mark(one, one.num_computed_tokens, one.num_preemptions) for one in self._scheduler.requests.values()]

    def _advanced(self, marks: list[_Mark]) -> tuple[int, int]:
        """Prompt tokens computed by the step, and sequences that decoded in it. What was loaded is neither."""
        prefill_tokens = decode_sequences = 0
        for mark in marks:
            one = mark.request
            self._preemptions += one.num_preemptions - mark.preemptions
            if one.num_computed_tokens <= mark.computed:
                continue
            if mark.computed >= one.num_prompt_tokens or one.request_id in self._loads:
                decode_sequences += mark.computed > 0
            else:
                prefill_tokens += min(one.num_computed_tokens, one.num_prompt_tokens) - mark.computed
        # A prefix found in the cache counts as computed at once: no step computes more than its budget.
        return min(prefill_tokens, self._scheduler.max_num_scheduled_tokens), decode_sequences

    @staticmethod
    def _progress(output: Any) -> Progress:
        one = output.outputs[0]
        lines = one.logprobs or [None] * len(one.token_ids)
        return Progress(
            name=output.request_id,
            tokens=tuple(_line(token, line) for token, line in zip(one.token_ids, lines, strict=True)),
            finish=one.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
        )


def model_folder(config: EngineConfig) -> Path:
    """Where the model's files are: the folder itself, or the one into which a name was fetched.

    Raises `ConfigInvalid` when a name is in nobody's reach.
    """
    if config.model_path is None:
        raise ConfigInvalid("vLLM needs a model", todo="name a folder or a Hugging Face model", param="model_path")
    if config.model_path.is_dir():
        return config.model_path
    from huggingface_hub import snapshot_download

    name = str(config.model_path)
    try:
        found = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
    except (OSError, ValueError) as error:  # a name that is none, and whatever goes wrong on the way to the hub
        raise ConfigInvalid(
            f"model {name} is neither a folder nor to be had from the Hugging Face hub",
            why=" ".join(str(error).split())[:300],
            param="model_path",
        ) from error
    return Path(found)


def _own_arguments(config: EngineConfig, fingerprint: str) -> dict[str, Any]:
    from isthmus_shared.engines.vllm import sampler

    return {
        "model": str(model_folder(config)),
        "served_model_name": config.model_name,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "async_scheduling": False,
        "disable_log_stats": False,
        "logits_processors": [sampler.SeededSampler],
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"worker_flows": True, "model_fingerprint": fingerprint},
        },
    }


def _set_surroundings(threads: int) -> None:
    """What vLLM takes from the environment, where the operator has not said otherwise; but one process it must be.

    Its CPU backend would bind its threads to all cores; and the sampler here is written for the first model runner.
    """
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    torch.set_num_threads(threads)


def _info(engine: Any, config: EngineConfig, version: str) -> CoreInfo:
    scheduler = engine.engine_core.engine_core.scheduler
    cache, shape = scheduler.kv_cache_config, scheduler.connector.kv_shape
    pool = scheduler.kv_cache_manager.block_pool
    return CoreInfo(
        shape=shape,
        max_model_len_tokens=engine.model_config.max_model_len,
        vocab_size=engine.model_config.get_vocab_size(),
        eos_token_ids=eos_token_ids(model_folder(config)),
        block_tokens=scheduler.block_size,
        blocks_total=pool.get_num_free_blocks(),
        layout=f"vLLM {version}, {cache.kv_cache_layout}, block {scheduler.block_size}, {shape.dtype}",
        version=version,
    )


def _line(token_id: int, entries: Any) -> TokenLine:
    if entries is None:
        return TokenLine(token_id)
    ranked = sorted(entries.items(), key=lambda entry: (entry[1].rank, entry[0]))
    return TokenLine(token_id, entries[token_id].logprob, tuple((other, entry.logprob) for other, entry in ranked))
