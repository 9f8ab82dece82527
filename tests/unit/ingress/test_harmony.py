"""Which of a gpt-oss model's tokens are for the reader, which are its reasoning, and which are markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_ingress.harmony import MAX_HEADER_BYTES, HarmonyMarkers, HarmonyParser, Part, find_markers, part_of

NAMES = ("start", "channel", "message", "end", "return", "call", "constrain")
IDS = {f"<|{name}|>": 1000 + number for number, name in enumerate(NAMES)}
TEXTS = {token: text for text, token in IDS.items()}
MARKERS = HarmonyMarkers(
    IDS["<|start|>"],
    IDS["<|channel|>"],
    IDS["<|message|>"],
    frozenset(IDS[f"<|{name}|>"] for name in ("end", "return", "call")),
)


def tokens(text: str) -> list[int]:
    """Markers as one token, all else as bytes."""
    found: list[int] = []
    while text:
        marker = next((name for name in IDS if text.startswith(name)), None)
        if marker is None:
            found += text[0].encode()
            text = text[1:]
        else:
            found.append(IDS[marker])
            text = text.removeprefix(marker)
    return found


def token_bytes(token_id: int) -> bytes:
    return TEXTS[token_id].encode() if token_id in TEXTS else bytes([token_id])


def parsed(text: str) -> tuple[str, str]:
    """(content, reasoning)"""
    parser = HarmonyParser(MARKERS, token_bytes)
    found: dict[Part, bytearray] = {part: bytearray() for part in Part}
    for token_id in tokens(text):
        found[parser.push(token_id)] += token_bytes(token_id)
    return found[Part.CONTENT].decode(), found[Part.REASONING].decode()


@pytest.mark.parametrize(
    ("answer", "content", "reasoning"),
    [
        ("<|channel|>final<|message|>Hello<|return|>", "Hello", ""),
        (
            "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            "Hi",
            "They greet.",
        ),
        ("<|channel|>commentary<|message|>I look it up.<|end|>", "I look it up.", ""),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>', "", '{"a":1}'),
        ("<|message|>no channel<|return|>", "no channel", ""),
        ("<|channel|>final<|message|>a<|end|> noise <|start|>assistant<|channel|>final<|message|>b", "ab", ""),
        ("<|channel|>analysis<|message|>cut off", "", "cut off"),
        ("<|channel|>ana", "", ""),
    ],
)
def test_an_answer_is_taken_apart(answer: str, content: str, reasoning: str) -> None:
    assert parsed(answer) == (content, reasoning)


def test_a_model_that_has_lost_the_format_is_heard_all_the_same() -> None:
    lost = "x" * (MAX_HEADER_BYTES + 50)
    content, reasoning = parsed(lost)
    assert lost.endswith(content)
    assert len(content) == 49
    assert reasoning == ""


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["analysis", "final", "commentary"]), PLAIN), max_size=6))
def test_messages_of_any_number_and_order_lose_nothing(messages: list[tuple[str, str]]) -> None:
    text = "<|start|>assistant".join(f"<|channel|>{channel}<|message|>{body}<|end|>" for channel, body in messages)
    content, reasoning = parsed(text)
    assert content == "".join(body for channel, body in messages if channel != "analysis")
    assert reasoning == "".join(body for channel, body in messages if channel == "analysis")


def test_a_recipient_before_the_channel_is_the_roles() -> None:
    assert part_of("assistant to=user<|channel|>final") is Part.CONTENT


@pytest.mark.parametrize(
    ("config", "known", "there"),
    [
        ({"model_type": "gpt_oss"}, IDS, True),
        ({"model_type": "llama"}, IDS, False),
        ({"model_type": "gpt_oss"}, {}, False),
        ([], IDS, False),
    ],
)
def test_only_a_gpt_oss_folder_with_the_markers_is_parsed(
    tmp_path: Path, config: object, known: dict[str, int], there: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_markers(tmp_path, known.get) == (MARKERS if there else None)


def test_a_folder_without_a_config_is_no_gpt_oss(tmp_path: Path) -> None:
    assert find_markers(tmp_path, IDS.get) is None
