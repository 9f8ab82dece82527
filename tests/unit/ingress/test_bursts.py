"""Tokens that came at once, written at once: the same events as one by one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from isthmus_ingress.choice import Choice
from isthmus_ingress.detokenize import Detokenizer, JsonTexts, StopScanner
from isthmus_ingress.openai.render import ChunkMaker, Identity
from isthmus_ingress.outbox import MAX_UNREAD, Outbox
from isthmus_ingress.saga_types import Deliver, End

PIECES = [b"", b"a", b' "quoted"', b"\n", "é".encode(), "é".encode()[:1], "é".encode()[1:], "😀".encode()[:2], b"\xff"]


def piece(token_id: int) -> bytes:
    return PIECES[token_id % len(PIECES)]


def choice(*, stops: tuple[str, ...] = (), silent: frozenset[int] = frozenset()) -> Choice:
    return Choice(0, 0, Detokenizer(piece), StopScanner(stops), silent)


def deliver(token_id: int) -> Deliver:
    return Deliver(0, (token_id,), None, 0)


END = End(None, None)
TOKENS = st.lists(st.integers(0, 2 * len(PIECES)), min_size=1, max_size=12)


@given(st.lists(TOKENS, max_size=4), st.booleans())
def test_a_burst_is_written_as_its_tokens_one_by_one_are(bursts: list[list[int]], chat: bool) -> None:
    make = ChunkMaker(Identity("x", 1, "m", chat), usage_field=chat)
    quick, slow, texts = choice(), choice(), JsonTexts(piece)
    for tokens in bursts:
        found = quick.burst(tokens, texts)
        one_by_one = [make.text(0, text) for token in tokens if (text := slow.take(deliver(token)).text)]
        assert (make.burst(0, found.texts) if found.texts else b"") == b"".join(one_by_one)
        assert found.token_ids == tokens
    assert quick.tokens == slow.tokens
    assert quick.detokenizer.flush() == slow.detokenizer.flush()


def test_only_a_choice_whose_text_is_its_tokens_texts_is_simple() -> None:
    assert choice().simple
    assert not choice(stops=("x",)).simple
    assert not choice(silent=frozenset({3})).simple


def test_texts_are_kept_for_what_the_vocabulary_holds_only() -> None:
    texts = JsonTexts(lambda token_id: b"a" if token_id < 2 else b"")
    assert [texts.get(token_id) for token_id in (0, 1, 2, 10**12)] == [b"a", b"a", b"", b""]
    assert len(texts) == 2


PUTS = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(TOKENS.map(tuple), st.just(END), st.builds(deliver, st.just(7))))
)


@given(st.lists(PUTS, max_size=3))
def test_an_outbox_keeps_every_choices_order_and_joins_what_follows_each_other(
    rounds: list[list[tuple[int, Any]]],
) -> None:
    async def play() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        for puts in rounds:
            for index, effect in puts:
                assert outbox.flow(index, effect) if isinstance(effect, tuple) else outbox.put(index, effect)
            found = await outbox.take() if puts else []
            assert [flat(index, found) for index in range(3)] == [flat(index, puts) for index in range(3)]
            for one, two in itertools.pairwise(found):
                assert not (isinstance(one[1], list) and isinstance(two[1], list) and one[0] == two[0])

    asyncio.run(play())


def flat(index: int, among: Iterable[tuple[int, Any]]) -> list[object]:
    told: list[object] = []
    for at, effect in among:
        if at == index:
            told.extend(effect if isinstance(effect, tuple | list) else [effect])
    return told


async def test_an_outbox_is_full_at_its_bound_whatever_is_in_it() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    assert all(outbox.flow(0, (1,)) for _ in range(MAX_UNREAD))
    assert not outbox.flow(0, (1,))
    assert outbox.put(0, END), "an end is always taken"


def test_an_event_is_json_whatever_its_text() -> None:
    make, texts = ChunkMaker(Identity("x", 1, "m", True), usage_field=False), JsonTexts(piece)
    data = make.burst(0, choice().burst([2, 3, 4], texts).texts)
    told = [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in told] == [' "quoted"', "\n", "é"]
