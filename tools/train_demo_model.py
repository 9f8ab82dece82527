#!/usr/bin/env python3
"""Trains the demo's model: a byte-level transformer of 1.7 million parameters on the King James Bible. CPU only.

    apt install bible-kjv
    bible -f gen1:1-rev22:21 > kjv.txt
    OMP_NUM_THREADS=1 python tools/train_demo_model.py kjv.txt OUT_FOLDER

The text is in the public domain. With the same text, seed, steps and torch the same weights come out on one machine.
It learns running text and turns of a chat: something of a verse is said, and verses that begin with it are answered.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from torch import Tensor

from isthmus_shared.engines.reference.checkpoint import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    SPECIAL_TOKENS,
    TinySize,
    byte_tokenizer,
    model_config,
    tokenizer_config,
)
from isthmus_shared.engines.reference.model import rope_frequencies, rotate
from isthmus_shared.engines.reference.model_config import RopeConfig

SIZE = TinySize(hidden=192, intermediate=512, layers=4, heads=6, kv_heads=2, head_dim=32, window=128, seed=7)
STEPS = 1000
ROWS, TOKENS = 8, 257
LONGEST_GAP_TOKENS = 2048
"""Positions jump between a row's texts, so that far ones are known although rows are short."""
MATRIX_RATE, OTHER_RATE, WARM_UP_STEPS, WEIGHT_DECAY = 2e-2, 1e-2, 20, 0.05
USER, ASSISTANT, END = (256 + SPECIAL_TOKENS.index(f"<|{name}|>") for name in ("user", "assistant", "end"))
QUESTIONS = (
    "{}",
    "{}?",
    "Tell me of {}.",
    "What is {}?",
    "What of {}?",
    "Speak to me of {}",
    "Who is {}?",
    "Hello, {}!",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("text", type=Path, help="what `bible -f gen1:1-rev22:21` prints")
    options.add_argument("out", type=Path, help="the folder to write")
    options.add_argument("--steps", type=int, default=STEPS)
    chosen = options.parse_args()
    torch.manual_seed(SIZE.seed)
    torch.use_deterministic_algorithms(True)
    model = Model()
    train(model, Texts(read_verses(chosen.text), SIZE.seed), chosen.steps)
    write(model, chosen.out)


def read_verses(path: Path) -> list[bytes]:
    verses = re.findall(rb"^\w+?\d+:\d+ (.+)$", path.read_bytes(), re.MULTILINE)
    if len(verses) < 1000:
        raise SystemExit(f"{path} has {len(verses)} verses; give what `bible -f gen1:1-rev22:21` prints")
    return [verse.strip() for verse in verses]


class Texts:
    """Endless rows of tokens and positions, from a seeded generator."""

    def __init__(self, verses: list[bytes], seed: int) -> None:
        self._verses = verses
        self._random = np.random.Generator(np.random.Philox(seed))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and their positions, each [ROWS, TOKENS]."""
        rows = [self._row() for _ in range(ROWS)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([positions for _, positions in rows])

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        positions: list[int] = []
        while len(tokens) < TOKENS:
            text = self._chat() if self._random.random() < 0.6 else self._passage()
            start = positions[-1] + 1 if positions else 0
            if positions and self._random.random() < 0.5:
                start += int(self._random.integers(LONGEST_GAP_TOKENS))
            tokens += text
            positions += range(start, start + len(text))
        return tokens[:TOKENS], positions[:TOKENS]

    def _passage(self) -> list[int]:
        first = int(self._random.integers(len(self._verses) - 3))
        return list(b" ".join(self._verses[first : first + 3]))

    def _chat(self) -> list[int]:
        turns = 2 if self._random.random() < 0.3 else 1
        tokens = [BOS_TOKEN_ID]
        for turn in range(turns):
            said, answer = self._turn()
            tokens += [USER, *said, END, ASSISTANT, *answer, EOS_TOKEN_ID if turn == turns - 1 else END]
        return tokens

    def _turn(self) -> tuple[bytes, bytes]:
        first = int(self._random.integers(len(self._verses) - 1))
        verse = self._verses[first]
        answer = b" ".join(self._verses[first : first + int(self._random.integers(1, 3))])
        words = verse.split()
        if self._random.random() < 0.3:
            half = max(1, len(words) // 2)
            return b" ".join(words[:half]), b" ".join([*words[half:], *answer[len(verse) :].split()])
        word = max(self._random.choice(len(words), min(3, len(words)), replace=False), key=lambda at: len(words[at]))
        question = QUESTIONS[int(self._random.integers(len(QUESTIONS)))]
        return question.format(words[word].strip(b".,;:!?()").decode()).encode(), answer


@dataclass(frozen=True, slots=True)
class Layer:
    """Names as in the checkpoint; each a leaf [out, in]."""

    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    input_layernorm: Tensor
    post_attention_layernorm: Tensor

    def matrices(self) -> list[Tensor]:
        return [self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj]


class Model:
    """The reference engine's arithmetic for whole rows, with gradients. The attention sinks stay at logit 0."""

    def __init__(self) -> None:
        hidden, inner, vocabulary = SIZE.hidden, SIZE.intermediate, 256 + len(SPECIAL_TOKENS)
        q_size, kv_size = SIZE.heads * SIZE.head_dim, SIZE.kv_heads * SIZE.head_dim
        self.embedding = normal(vocabulary, hidden, 0.2)
        self.head = normal(vocabulary, hidden, hidden**-0.5)
        self.norm = ones(hidden)
        into_stream = 1 / (2 * SIZE.layers) ** 0.5
        self.layers = [
            Layer(
                q_proj=normal(q_size, hidden, hidden**-0.5),
                k_proj=normal(kv_size, hidden, hidden**-0.5),
                v_proj=normal(kv_size, hidden, hidden**-0.5),
                o_proj=normal(hidden, q_size, q_size**-0.5 * into_stream),
                gate_proj=normal(inner, hidden, hidden**-0.5),
                up_proj=normal(inner, hidden, hidden**-0.5),
                down_proj=normal(hidden, inner, inner**-0.5 * into_stream),
                input_layernorm=ones(hidden),
                post_attention_layernorm=ones(hidden),
            )
            for _ in range(SIZE.layers)
        ]
        self._frequencies = rope_frequencies(RopeConfig(theta=10000.0), SIZE.head_dim)

    def matrices(self) -> list[Tensor]:
        return [matrix for layer in self.layers for matrix in layer.matrices()]

    def others(self) -> list[Tensor]:
        norms = [norm for layer in self.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        return [self.embedding, self.head, self.norm, *norms]

    def loss(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Nats per token, over rows [B, T + 1]."""
        given, wanted, positions = tokens[:, :-1], tokens[:, 1:], positions[:, :-1]
        angles = positions.double()[..., None] * self._frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        full, sliding = masks(positions)
        x = self.embedding[given]
        for index, layer in enumerate(self.layers):
            mask = full if index % 2 == 0 else sliding
            x = x + attention(layer, norm(x, layer.input_layernorm), cos, sin, mask)
            y = norm(x, layer.post_attention_layernorm)
            gated = functional.silu(functional.linear(y, layer.gate_proj)) * functional.linear(y, layer.up_proj)
            x = x + functional.linear(gated, layer.down_proj)
        logits = functional.linear(norm(x, self.norm), self.head)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def normal(rows: int, columns: int, deviation: float) -> Tensor:
    return (torch.randn(rows, columns) * deviation).requires_grad_()


def ones(size: int) -> Tensor:
    return torch.ones(size).requires_grad_()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (SIZE.hidden,), weight, 1e-6)


def masks(positions: Tensor) -> tuple[Tensor, Tensor]:
    """What each query sees, bool [B, 1, T, 1 + T] of full and of sliding layers; the first column is the sink."""
    length = positions.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(len(positions), -1, -1)
    near = positions[:, :, None] - positions[:, None, :] < SIZE.window
    full, sliding = (functional.pad(seen, (1, 0), value=True)[:, None] for seen in (causal, causal & near))
    return full, sliding


def attention(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    def heads(weight: Tensor) -> Tensor:
        return functional.linear(x, weight).unflatten(-1, (-1, SIZE.head_dim)).transpose(1, 2)

    q, k = (rotate(heads(weight), cos, sin).bfloat16() for weight in (layer.q_proj, layer.k_proj))
    # A key of zeros has logit 0 and adds nothing: the sink.
    k, v = (functional.pad(part, (0, 0, 1, 0)) for part in (k, heads(layer.v_proj)))
    k, v = (part.repeat_interleave(SIZE.heads // SIZE.kv_heads, dim=1) for part in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return functional.linear(attended.transpose(1, 2).flatten(2), layer.o_proj)


def train(model: Model, texts: Texts, steps: int) -> None:
    """Muon for the layers' matrices, AdamW for the rest; linear warm-up, then a cosine down to nothing."""
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(model.matrices(), lr=MATRIX_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(model.others(), lr=OTHER_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share, steps=steps)) for optimizer in optimizers]
    started, recent = time.monotonic(), deque[float](maxlen=50)
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(*texts.batch())
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        recent.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            nats, took_s = sum(recent) / len(recent), time.monotonic() - started
            print(f"step {step}/{steps}  {nats:.3f} nats per byte  {took_s:.0f} s", flush=True)


def share(step: int, steps: int) -> float:
    """Of the highest learning rate."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def write(model: Model, folder: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm,
        "lm_head.weight": model.head,
    }
    for index, layer in enumerate(model.layers):
        at = f"model.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = getattr(layer, name)
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{at}.mlp.{name}.weight"] = getattr(layer, name)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = getattr(layer, name)
        tensors[f"{at}.self_attn.sinks"] = torch.zeros(SIZE.heads)
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    vocabulary = 256 + len(SPECIAL_TOKENS)
    for name, fields in (("config", model_config(SIZE, vocabulary)), ("tokenizer_config", tokenizer_config(SIZE))):
        (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
