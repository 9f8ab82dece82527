"""Every refusal of a request names the field at fault, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from isthmus_ingress.openai.schema import ChatRequest, CompletionRequest, parse_chat, parse_completion
from isthmus_shared.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")
USER = {"role": "user", "content": "x"}
INTS = ("max_tokens", "top_k", "seed", "n")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
BOOLS = ("ignore_eos", "stream", "return_token_ids")
NO_INT: list[Any] = [True, 1.5, NAN, INF, "1", "", [1], {}, 2**70, -(2**70), 10**400]
NO_FLOAT: list[Any] = [True, NAN, INF, -INF, "1", "", [1.0], {}, 10**400, -(10**400)]
NO_BOOL: list[Any] = [0, 1, "true", "", [], {}]
COMMON: list[tuple[str, Any]] = [
    *((field, bad) for field in INTS for bad in NO_INT),
    *((field, bad) for field in FLOATS for bad in NO_FLOAT),
    *((field, bad) for field in BOOLS for bad in NO_BOOL),
    *(("stop", bad) for bad in ["", 1, True, {}, ["x"] * 17, "x" * 1025]),
    *(("stop_token_ids", bad) for bad in [1, "x", {}, list(range(10_000))]),
    *(("stream_options", bad) for bad in [1, "x", [], {"include_usage": True}, {"include_usage": False}]),
    *(("model", bad) for bad in [1, True, ["tiny"], {}]),
    *((field, bad) for field in ("tools", "functions", "logit_bias", "bad_words") for bad in [[{}], {"1": 1}, 1, "x"]),
    *(("response_format", bad) for bad in [{}, {"type": "json_object"}, [], "text"]),
    *((field, bad) for field in ("best_of", "suffix", "tool_choice", "wibble") for bad in [7, "x", [1], {"a": 1}, NAN]),
]
CHAT: list[tuple[str, Any]] = [
    *(("max_completion_tokens", bad) for bad in [0, -1, *NO_INT[:8]]),
    *(("top_logprobs", bad) for bad in [1, 21, -1, *NO_INT]),
    *(("logprobs", bad) for bad in [1, 5, *NO_BOOL]),
    *(("add_generation_prompt", bad) for bad in NO_BOOL),
    *(("chat_template_kwargs", bad) for bad in [1, "x", []]),
    *(("echo", bad) for bad in [True, 1, "x"]),
    *(("messages", bad) for bad in [None, [], "x", {}, 1]),
]
COMPLETIONS: list[tuple[str, Any]] = [
    *(("logprobs", bad) for bad in [21, -1, *NO_INT]),
    *(("echo", bad) for bad in NO_BOOL),
    *(
        ("prompt", bad)
        for bad in [None, [], {}, 1, True, [[]], [None], [True], [1.5], [-1], [2**31], [1, "x"], ["x", 1]]
    ),
    *(("prompt", bad) for bad in [[[1], "x"], [["x"]], ["x"] * 129]),
    ("max_completion_tokens", 1),
    ("messages", [USER]),
]
DEEPER: list[tuple[Any, str]] = [
    ([1], "messages[0]"),
    ([None], "messages[0]"),
    ([[]], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": None, "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 1}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"),
    ([USER, {"role": "user", "content": [1]}], "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x", "wibble": 1}], "messages[0].wibble"),
    ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
]


def repr_short(value: Any) -> str:
    return repr(value)[:20]


def refusal(parse: Callable[[Mapping[str, Any]], object], body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.http_status == 400
    return caught.value


@pytest.mark.parametrize(("field", "bad"), [*COMMON, *CHAT], ids=repr_short)
def test_what_is_wrong_in_a_chat_is_named(field: str, bad: Any) -> None:
    error = refusal(parse_chat, {"messages": [USER], field: bad})
    assert error.param is not None
    assert error.param.partition("[")[0].partition(".")[0] == field
    assert field in error.text


@pytest.mark.parametrize(("field", "bad"), [*COMMON, *COMPLETIONS], ids=repr_short)
def test_what_is_wrong_in_a_completion_is_named(field: str, bad: Any) -> None:
    error = refusal(parse_completion, {"prompt": "x", field: bad})
    assert error.param is not None
    assert error.param.partition("[")[0].partition(".")[0] == field
    assert field in error.text


@pytest.mark.parametrize(("messages", "param"), DEEPER)
def test_a_place_within_messages_is_named_in_full(messages: Any, param: str) -> None:
    assert refusal(parse_chat, {"messages": messages}).param == param


def test_a_missing_or_nameless_field_is_named_too() -> None:
    assert refusal(parse_chat, {}).param == "messages"
    assert refusal(parse_completion, {}).param == "prompt"
    assert refusal(parse_chat, {"messages": [USER], "": 1}).param == "body"
    assert refusal(parse_completion, {"prompt": "x", "echo": True, "logprobs": 1}).param == "echo"
    assert refusal(parse_chat, {"messages": [USER], "stop": ["a", ""]}).param == "stop[1]"
    assert refusal(parse_chat, {"messages": [USER], "stop": ["a", 1]}).param == "stop[1]"
    assert refusal(parse_chat, {"messages": [USER], "stop_token_ids": [1, -1]}).param == "stop_token_ids[1]"
    options = {"stream": True, "stream_options": {"wibble": 1}}
    assert refusal(parse_chat, {"messages": [USER], **options}).param == "stream_options.wibble"


def test_null_asks_for_nothing_in_every_field_that_may_be_left_out() -> None:
    for name in ChatRequest.model_fields.keys() - {"messages"}:
        assert parse_chat({"messages": [USER], name: None}) == parse_chat({"messages": [USER]})
    for name in CompletionRequest.model_fields.keys() - {"prompt"}:
        parse_completion({"prompt": "x", name: None})


def test_an_empty_list_of_parts_is_an_empty_message() -> None:
    request = parse_chat({"messages": [{"role": "user", "content": []}]})
    assert request.messages[0].as_template_input() == {"role": "user", "content": ""}
