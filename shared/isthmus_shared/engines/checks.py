"""What limits an engine has, what it refuses at submit, and how it words an end. Pure."""

from __future__ import annotations

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.port import EngineRequest, SequenceOutput
from isthmus_shared.engines.runner_port import RunnerInfo
from isthmus_shared.engines.scheduler import SchedulerLimits
from isthmus_shared.engines.sequence import Sequence
from isthmus_shared.errors import Cancelled, Fault, InvalidRequest, ManifestMismatch
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import FinishReason

ABORTED = Cancelled("the sequence was aborted").to_fault()


def limits_of(info: RunnerInfo, config: EngineConfig) -> SchedulerLimits:
    capacity_tokens = info.blocks_total * info.layout.block_tokens
    return SchedulerLimits(
        block_tokens=info.layout.block_tokens,
        blocks_total=info.blocks_total,
        max_model_len_tokens=min(
            info.max_model_len_tokens, capacity_tokens, config.max_model_len_tokens or capacity_tokens
        ),
        max_running=config.max_batch,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
    )


def check_tokens(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises `InvalidRequest`."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequest(f"token ids must be below {vocab_size}, the vocabulary's size", param="prompt")


def check_transfer(request: EngineRequest, shape: KvShape) -> None:
    """The sink or source has the size of the KV that it is for. Raises `ManifestMismatch`."""
    transfer = request.kv_save or request.kv_load
    if transfer is None or not request.token_ids:
        return
    tokens = len(request.token_ids)
    if request.loaded_tokens > tokens:
        raise ManifestMismatch(
            "the transfer has KV of more tokens than there are",
            why=f"{request.loaded_tokens} there, {tokens} here",
            param="prompt_tokens",
        )
    ours = shape.manifest(request.loaded_tokens or tokens).total_bytes
    if transfer.total_bytes != ours:
        raise ManifestMismatch(
            "the transfer's size is not this prompt's KV",
            why=f"here {ours} bytes, there {transfer.total_bytes}",
            param="total_bytes",
        )


def ended(sequence: Sequence, index: int, finish: FinishReason, fault: Fault | None) -> SequenceOutput:
    return SequenceOutput(request_id=sequence.request.request_id, output_index=index, finish=finish, fault=fault)
