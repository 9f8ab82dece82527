"""A model's folder without a model: a tokenizer of made-up words and the files that front doors read beside it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from isthmus_cli.load.plan import SYLLABLES

NAME = "door"
VOCABULARY = 4096
SPECIAL = ("<|end|>", "<|say|>", "<|over|>", "<|none|>")
FIRST_TEXT_TOKEN = 300
"""After the special tokens and the single bytes, of which some are no character by themselves."""
TEMPLATE = (
    "{% for m in messages %}<|say|>{{ m['role'] }}\n{{ m['content'] }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|say|>assistant\n{% endif %}"
)


def make_model_folder(folder: Path) -> Path:
    """Takes two seconds; what is there already is left as it is."""
    if (folder / "tokenizer_config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(1)
    words = ["".join(random.choices(SYLLABLES, k=random.randint(1, 4))) for _ in range(3000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(random.choices(words, k=30)) for _ in range(3000)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", _config(tokenizer.get_vocab_size()))
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3})
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[3]}
    _write(folder / "special_tokens_map.json", named)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768, "chat_template": TEMPLATE}
    _write(folder / "tokenizer_config.json", {**named, **about})
    return folder


def _config(vocabulary: int) -> dict[str, object]:
    """Of a Llama, as small as one may be: mock engines read its sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
