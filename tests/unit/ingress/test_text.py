from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from isthmus_ingress.detokenize import Detokenizer, StopScanner
from isthmus_ingress.text import ChatTemplate, Tokenizer, load_model_text
from isthmus_shared.errors import ConfigInvalid, InvalidRequest
from isthmus_testing.ingress import write_text_folder


def as_byte(token_id: int) -> bytes:
    return bytes([token_id])


@given(st.text())
def test_characters_come_whole_and_together_give_the_text(text: str) -> None:
    detokenizer = Detokenizer(as_byte)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(st.binary())
def test_bytes_that_are_no_text_become_what_a_whole_decode_makes_of_them(data: bytes) -> None:
    detokenizer = Detokenizer(as_byte)
    assert "".join(map(detokenizer.push, data)) + detokenizer.flush() == data.decode("utf-8", errors="replace")


@given(st.text(alphabet="abc"), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), st.randoms())
def test_a_stop_is_found_however_the_text_is_cut(text: str, stops: list[str], cuts: random.Random) -> None:
    scanner = StopScanner(stops)
    shown, found, rest = "", False, text
    while rest and not found:
        size = cuts.randint(1, 3)
        piece, found = scanner.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
        assert not any(stop in shown for stop in stops)
    if not found:
        shown += scanner.flush()
    firsts = [text.find(stop) for stop in stops if stop in text]
    assert found == bool(firsts)
    if not firsts:
        assert shown == text
    else:
        assert text.startswith(shown), "nothing that is not in the text"
        assert any(text[len(shown) :].startswith(stop) for stop in stops), "it ends where a stop begins"


def test_only_what_may_become_a_stop_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("so E") == ("so ", False)
    assert scanner.push("N") == ("", False)
    assert scanner.push("x") == ("ENx", False)
    assert scanner.push("!E") == ("!", False)
    assert scanner.push("ND?") == ("", True)


def sentencepiece_like() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁w", "ör", "ld"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["</s>"])
    return inner


def test_sentencepiece_tokens_have_spaces_and_byte_tokens_their_byte() -> None:
    inner = sentencepiece_like()
    tokenizer = Tokenizer(inner, source="test")
    ids = [inner.token_to_id(piece) for piece in ("▁Hello", "▁w", "ör", "ld", "<0xE2>", "<0x82>", "<0xAC>", "</s>")]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in ids] == [" Hello", " w", "ör", "ld", "", "", "€", ""]
    assert tokenizer.decode(ids, special=True).endswith("€</s>")
    assert " " + inner.decode(ids) == tokenizer.decode(ids)


def test_byte_level_text_is_what_the_library_decodes(tmp_path: Path) -> None:
    text = load_model_text(write_text_folder(tmp_path))
    ids = text.tokenizer.encode("Zürich <|end|> 東京\n", special=True)
    assert 263 in ids, "a special token in the text is that token"
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert text.tokenizer.decode(ids) == library.decode(list(ids))
    assert text.tokenizer.decode(ids, special=True) == library.decode(list(ids), skip_special_tokens=False)
    assert text.tokenizer.token_bytes(10_000) == b"", "a padded vocabulary has ids without a token"


def test_a_kind_of_tokenizer_that_cannot_be_streamed_is_refused_at_start() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    inner.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ConfigInvalid, match="WordPiece"):
        Tokenizer(inner, source="x")


@pytest.mark.parametrize(("content", "words"), [(None, "does not exist"), ("{}", "not a tokenizer")])
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigInvalid, match=words):
        load_model_text(tmp_path)


USER = [{"role": "user", "content": "<b>"}]


def test_a_template_gets_the_models_own_tokens_and_no_html() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0] | tojson }}{% if x %}{{ x }}{% endif %}", {"bos_token": "<s>"}
    )
    assert template.render(USER, {"x": 1}) == '<s>{"role": "user", "content": "<b>"}1'


def test_what_a_template_refuses_is_the_clients_fault_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(USER, {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(USER, {})


def test_a_template_file_wins_over_the_configurations(tmp_path: Path) -> None:
    write_text_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    template = load_model_text(tmp_path).chat_template
    assert template is not None
    assert template.render(USER, {}) == "from a file"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{% break %}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(ConfigInvalid, match="does not parse"):
        load_model_text(tmp_path)
