"""What vLLM is asked for a request, and what is told of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.vllm.flows import FlowTable
from isthmus_shared.engines.vllm.live import Live, Phase
from isthmus_shared.engines.vllm.turns import SAMPLING_KEY, Progress, TokenLine
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.shape import KvShape, group_layers
from isthmus_shared.messages.work import FinishReason, SamplingParams

EOS = frozenset({7})
SHAPE = KvShape(model_fingerprint="f", dtype=KvDtype.FP32, groups=group_layers([None], kv_heads=1, head_dim=2))
PROMPT = (1, 2, 3, 4)


def live(*, save: bool = False, load: bool = False, offset: int = 0, **sampling: Any) -> Live:
    transfer = MemoryKvTransfer(SHAPE.manifest(len(PROMPT)).total_bytes)
    params = SamplingParams.model_validate({"max_tokens": 8, "temperature": 0.0} | sampling)
    request = EngineRequest(
        request_id=RequestId("r"),
        token_ids=PROMPT,
        sampling=params,
        output_offset=offset,
        kv_save=transfer.sink if save else None,
        kv_load=transfer.source if load else None,
    )
    made = Live("isthmus-0", request, Phase.WAITING, in_vllm=True)
    if save:
        made.sink = FlowTable().put_sink("isthmus-0", transfer.sink, lambda: None)
    return made


def asked(one: Live) -> Any:
    return one.for_vllm(SHAPE.manifest(len(PROMPT)), EOS)


def progress(*tokens: int, finish: str | None = None) -> Progress:
    lines = tuple(TokenLine(token, -0.5, ((token, -0.5), (9, -1.0), (8, -2.0))) for token in tokens)
    return Progress("isthmus-0", lines, finish, cached_tokens=3)


def test_a_greedy_request_needs_no_sampler() -> None:
    new = asked(live())
    assert new.token_ids == PROMPT
    assert new.params["max_tokens"] == 8
    assert new.params["stop_token_ids"] == [7]
    assert new.params["extra_args"] is None
    assert asked(live(ignore_eos=True)).params["stop_token_ids"] == []


def test_a_prefill_asks_for_one_token_and_names_its_flow() -> None:
    new = asked(live(save=True))
    assert new.params["max_tokens"] == 1
    assert new.params["extra_args"]["kv_transfer_params"] == {
        "do_remote_decode": True,
        "transfer_id": "isthmus-0",
        "generation": 1,
    }


def test_a_decode_goes_on_after_the_first_token() -> None:
    one = live(load=True, temperature=0.7, seed=5)
    one.first_token_id = 42
    new = asked(one)
    assert new.loads
    assert new.token_ids == (*PROMPT, 42)
    assert new.params["max_tokens"] == 7
    ticket = new.params["extra_args"]["kv_transfer_params"]["ticket"]
    assert ticket["manifest"]["prompt_tokens"] == len(PROMPT)
    sampling = new.params["extra_args"][SAMPLING_KEY]
    assert sampling["previous"] == (42,)
    assert sampling["first_index"] == 1


def test_a_resumed_request_samples_from_where_it_was() -> None:
    new = asked(live(offset=2, temperature=0.7))
    assert new.params["max_tokens"] == 6
    assert new.params["extra_args"][SAMPLING_KEY]["previous"] == (3, 4)
    assert new.params["extra_args"][SAMPLING_KEY]["first_index"] == 2


def test_penalties_need_the_sampler_even_when_greedy() -> None:
    assert SAMPLING_KEY in asked(live(presence_penalty=0.5)).params["extra_args"]


def test_tokens_are_told_as_they_come_and_the_last_with_the_end() -> None:
    one = live(logprobs=2)
    first = one.take(progress(5), EOS)
    assert first is not None
    assert (first.output_index, first.token_ids, first.finish) == (0, (5,), None)
    assert first.logprobs is not None
    assert first.logprobs[0].top == ((5, -0.5), (9, -1.0))
    assert one.take(progress(7, finish="stop"), EOS) is None
    assert not one.over()
    one.in_vllm = False
    assert one.over()
    last = one.last_output()
    assert (last.output_index, last.token_ids, last.finish) == (1, (7,), FinishReason.STOP)
    assert last.cached_tokens == 3


@pytest.mark.parametrize(
    ("token", "max_tokens", "wanted"),
    [(5, 8, FinishReason.HANDOFF), (7, 8, FinishReason.STOP), (5, 1, FinishReason.LENGTH)],
)
def test_a_prefill_ends_with_its_real_reason_once_it_is_sealed(
    token: int, max_tokens: int, wanted: FinishReason
) -> None:
    one = live(save=True, max_tokens=max_tokens)
    one.take(progress(token, finish="length"), EOS)
    one.in_vllm = False
    assert not one.over()
    assert one.sink is not None
    one.sink.map(0, one.sink.total_bytes)
    one.sink.filled(0, one.sink.total_bytes)
    one.sink.seal()
    assert one.over()
    assert (one.last_output().token_ids, one.last_output().finish) == ((token,), wanted)


def test_a_prefill_whose_kv_is_lost_gives_no_token() -> None:
    one = live(save=True)
    one.take(progress(5, finish="length"), EOS)
    one.in_vllm = False
    assert one.sink is not None
    with pytest.raises(Exception, match="sealed with 0"):
        one.sink.seal()
    assert one.over()
    last = one.last_output()
    assert last.token_ids == ()
    assert last.finish is FinishReason.ERROR
    assert last.fault is not None
    assert last.fault.code == "transfer_failed"


def test_the_first_end_counts() -> None:
    one = live()
    one.end(FinishReason.CANCELLED)
    one.end(FinishReason.ERROR, None)
    assert one.take(progress(5), EOS) is None
    assert one.last_output().finish is FinishReason.CANCELLED
