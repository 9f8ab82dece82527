"""What can never run is refused at once, with the field named, before vLLM sees it. Pure."""

from __future__ import annotations

from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.errors import ContextTooLong, InvalidRequest, ManifestMismatch, NoCapacity
from isthmus_shared.kv.manifest import KvManifest


def check_form(request: EngineRequest, *, vocab_size: int) -> None:
    """Raises `InvalidRequest`."""
    tokens, offset = request.token_ids, request.output_offset
    if not tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(f"token ids must be below {vocab_size}, the vocabulary's size", param="prompt")
    if not 0 <= offset < len(tokens):
        raise InvalidRequest(f"a prompt of {len(tokens)} tokens, {offset} of them output", param="prompt")
    if offset >= request.sampling.max_tokens:
        raise InvalidRequest(
            f"max_tokens is {request.sampling.max_tokens}, but {offset} tokens are out already", param="max_tokens"
        )
    if request.kv_save is not None and request.kv_load is not None:
        raise InvalidRequest("a sequence either saves or loads its KV, not both")


def check_transfer(request: EngineRequest, ours: KvManifest) -> None:
    """Raises `ManifestMismatch`. `ours` is for the tokens that the transfer is said to have."""
    if ours.prompt_tokens > len(request.token_ids):
        raise ManifestMismatch(
            "the transfer has KV of more tokens than there are",
            why=f"{ours.prompt_tokens} there, {len(request.token_ids)} here",
            param="prompt_tokens",
        )
    transfer = request.kv_save or request.kv_load
    if transfer is not None and transfer.total_bytes != ours.total_bytes:
        raise ManifestMismatch(
            "the transfer's size is not this prompt's KV",
            why=f"here {ours.total_bytes} bytes, there {transfer.total_bytes}",
            param="total_bytes",
        )


def check_room(request: EngineRequest, *, limit_tokens: int) -> None:
    """Raises `ContextTooLong`."""
    prompt = len(request.token_ids) - request.output_offset
    total = prompt + request.sampling.max_tokens
    if total > limit_tokens:
        raise ContextTooLong(
            f"the context is {limit_tokens} tokens, but {total} are asked for",
            why=f"{prompt} in the prompt and up to {request.sampling.max_tokens} of output",
            todo="shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt < limit_tokens else "prompt",
        )


def check_queue(waiting: int, max_waiting: int) -> None:
    """Raises `NoCapacity`."""
    if waiting >= max_waiting:
        raise NoCapacity(
            f"{max_waiting} sequences wait already",
            todo="ask another worker, or raise max_waiting",
            retry_after_s=1.0,
        )
