"""The model that the demo serves: small, whole, and better than noise."""

from __future__ import annotations

import re
from pathlib import Path

from isthmus_shared import demo_model
from isthmus_testing.openai_client import Case, aggregated

MAX_BYTES = 5_000_000
COMMON = (
    "the and of to that in he shall unto for i his a lord they be is him not them it with all thou thy was god "
    "which my me said but ye their have will thee from as are when this out were upon man you by israel king son "
    "up there hath then people came had house into on her come one we children s before your also day land men"
)


def test_the_package_holds_it_whole_and_small() -> None:
    sizes = {name: (demo_model.FOLDER / name).stat().st_size for name in demo_model.FILES}
    assert sum(sizes.values()) < MAX_BYTES


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    demo_model.copy_to(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(demo_model.FILES)
    for name in demo_model.FILES:
        assert (tmp_path / name).read_bytes() == (demo_model.FOLDER / name).read_bytes()


async def test_its_answers_read_like_english() -> None:
    prompts = ("And it came to pass in those days, that ", "The king said unto the people, ")
    outcomes = await aggregated(
        demo_model.FOLDER, [Case(tuple(prompt.encode()), max_tokens=240, temperature=0.7, seed=1) for prompt in prompts]
    )
    for outcome in outcomes:
        text = bytes(token for token in outcome.tokens if token < 256).decode()
        words = re.findall(r"[a-z]+", text.lower())
        assert len(words) > 30, text
        assert len(set(words)) > 18, text
        assert sum(word in COMMON.split() for word in words) / len(words) > 0.5, text
