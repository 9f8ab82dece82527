"""Bytes of the stream, one by one: clients compare them."""

from __future__ import annotations

from isthmus_ingress.openai.errors import TooManyRequests, error_body, error_event, error_headers
from isthmus_ingress.openai.render import ChunkMaker, Identity, Usage, completion_token
from isthmus_shared.errors import ContextTooLong, InvalidRequest, PartyLost, TransferFailed, Unavailable

CHAT = Identity("chatcmpl-1", 1700000000, 'm"', chat=True)
TEXT = Identity("cmpl-1", 1700000000, "m", chat=False)
HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m\\""'
TEXT_HEAD = b'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m"'
USAGE = Usage(3, 2, 1)
USAGE_JSON = (
    b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}'
)


def test_chat_chunks() -> None:
    make = ChunkMaker(CHAT, usage_field=False)
    assert make.role(0) == (
        HEAD
        + b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        b"\n\n"
    )
    assert make.text(1, 'a"\n\x00é') == (
        HEAD + b',"choices":[{"index":1,"delta":{"content":"a\\"\\n\\u0000\xc3\xa9"},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    assert make.finish(0, "", "stop") == (
        HEAD + b',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    assert make.finish(0, "held", "length") == (
        HEAD + b',"choices":[{"index":0,"delta":{"content":"held"},"logprobs":null,"finish_reason":"length"}]}\n\n'
    )


def test_completion_chunks() -> None:
    make = ChunkMaker(TEXT, usage_field=False)
    assert make.text(0, "x", extra={"token_ids": [7]}) == (
        TEXT_HEAD + b',"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null,"token_ids":[7]}]}\n\n'
    )
    assert make.finish(0, "", "stop") == (
        TEXT_HEAD + b',"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}\n\n'
    )


def test_usage_is_null_until_its_own_chunk_or_told_in_each() -> None:
    make = ChunkMaker(TEXT, usage_field=True)
    assert make.text(0, "x").endswith(b'"finish_reason":null}],"usage":null}\n\n')
    assert make.text(0, "x", usage=USAGE).endswith(b'"finish_reason":null}],' + USAGE_JSON + b"}\n\n")
    assert make.usage(USAGE) == TEXT_HEAD + b',"choices":[],' + USAGE_JSON + b"}\n\n"


def test_a_token_that_is_no_text_is_named_by_its_bytes() -> None:
    assert completion_token("é".encode()) == "é"
    assert completion_token(b"\xc3") == "bytes:\\xc3"


def test_errors_in_openais_shape() -> None:
    error = ContextTooLong("too long", why="5 > 4", todo="shorten", param="messages")
    assert error_body(error) == {
        "error": {
            "message": "too long: 5 > 4; shorten",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert error_event(PartyLost("x")).startswith(b'event: error\ndata: {"error":{"message":"x","type":"server_error"')
    assert error_event(InvalidRequest("a\nb")).count(b"\n") == 3, "one data line"


def test_what_may_pass_says_when() -> None:
    assert error_headers(Unavailable("x")) == {"retry-after": "1"}
    assert error_headers(TransferFailed("x")) == {"retry-after": "1"}
    assert error_headers(TooManyRequests("x", retry_after_s=2.1)) == {"retry-after": "3"}
    assert error_headers(InvalidRequest("x")) == {}
