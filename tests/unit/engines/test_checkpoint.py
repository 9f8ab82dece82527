from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import jinja2
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from isthmus_shared.engines.reference.checkpoint import (
    EOS_TOKEN_ID,
    SPECIAL_TOKENS,
    byte_tokenizer,
    ensure_tiny_checkpoint,
)
from isthmus_shared.engines.reference.fingerprint import model_fingerprint


def test_the_same_checkpoint_comes_out_every_time(tmp_path: Path) -> None:
    one, other = (ensure_tiny_checkpoint(tmp_path / name) for name in ("one", "other"))
    assert model_fingerprint(one) == model_fingerprint(other)
    assert {path.name for path in one.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_two_processes_may_make_it_at_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    processes = [
        multiprocessing.get_context("spawn").Process(target=ensure_tiny_checkpoint, args=(target,)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert model_fingerprint(target) == model_fingerprint(ensure_tiny_checkpoint(tmp_path / "alone"))
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match="notes"):
        ensure_tiny_checkpoint(tmp_path / "notes")
    assert [path.name for path in tmp_path.rglob("*")] == ["notes", "mine.txt"]


@given(text=st.text())
def test_the_tokenizer_loses_nothing_and_its_ids_are_bytes(text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))  # each of those is one token
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_chat_template_marks_who_speaks(tmp_path: Path) -> None:
    folder = ensure_tiny_checkpoint(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = jinja2.Template(settings["chat_template"]).render(
        messages=messages, bos_token=settings["bos_token"], add_generation_prompt=True
    )
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert [token for token in ids if token >= 256] == [256, 259, 263, 260, 263, 261]
    assert tokenizer.token_to_id(settings["eos_token"]) == EOS_TOKEN_ID == 257
