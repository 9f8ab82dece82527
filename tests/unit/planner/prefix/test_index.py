"""The index answers right or too small, whatever it hears and however little room it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus_planner.prefix.index import PrefixIndex
from isthmus_shared.ids import Incarnation
from isthmus_shared.prefix import prefix_hashes

A, B = Incarnation("a"), Incarnation("b")


def prompt(length: int, *, shared: int = 0, seed: int = 0) -> tuple[bytes, ...]:
    return prefix_hashes([*range(shared), *(1000 * (seed + 1) + i for i in range(length - shared))], "")


def test_the_longest_cached_prefix_of_each_worker_counts() -> None:
    index = PrefixIndex()
    index.change(A, prompt(64 * 7), ())
    index.change(B, prompt(64 * 9, shared=64 * 3), ())
    whole = prompt(64 * 20)
    assert index.cached_tokens(whole) == {A: 64 * 7}
    assert index.cached_tokens(prompt(64 * 4, shared=64 * 3)) == {B: 64 * 4}
    assert index.cached_tokens(prompt(64 * 9, shared=64 * 3, seed=5)) == {B: 64 * 3}
    assert index.cached_tokens(prompt(64, seed=9)) == {}


def test_what_is_removed_replaced_or_forgotten_counts_no_more() -> None:
    index, hashes = PrefixIndex(), prompt(64 * 4)
    index.change(A, hashes, ())
    index.change(A, (), hashes[2:])
    assert index.cached_tokens(hashes) == {A: 128}
    index.replace(A, hashes[:1])
    assert index.cached_tokens(hashes) == {A: 64}
    index.forget(A)
    assert index.cached_tokens(hashes) == {}
    assert len(index) == 0


def test_beyond_its_bound_what_is_asked_for_stays_and_the_rest_goes() -> None:
    index = PrefixIndex(max_hashes=100)
    system = prompt(64 * 10, seed=1)
    index.change(A, system, ())
    for seed in range(2, 60):
        index.change(A, prompt(64 * 10, seed=seed), ())
        index.check_invariants()
        assert index.cached_tokens(system) == {A: 640}
    assert index.cached_tokens(prompt(64 * 10, seed=2)) == {}
    assert index.cached_tokens(prompt(64 * 10, seed=59)) == {A: 640}


def test_a_worker_that_comes_makes_everyones_share_smaller() -> None:
    index = PrefixIndex(max_hashes=100)
    index.change(A, prompt(64 * 90), ())
    index.change(B, prompt(64 * 90), ())
    index.check_invariants()
    assert len(index) <= 100


@given(st.data())
def test_it_never_says_more_than_there_is(data: st.DataObject) -> None:
    index, held = PrefixIndex(max_hashes=data.draw(st.integers(4, 60))), dict[Incarnation, set[bytes]]()
    prompts = [prompt(64 * 12, shared=64 * shared, seed=seed) for shared in (0, 3, 8) for seed in range(3)]
    for _ in range(data.draw(st.integers(1, 30))):
        life = Incarnation(data.draw(st.sampled_from("abc")))
        hashes = data.draw(st.sampled_from(prompts))[: data.draw(st.integers(0, 12))]
        known = held.setdefault(life, set())
        match data.draw(st.sampled_from(["store", "store", "remove", "replace", "forget"])):
            case "store":
                index.change(life, hashes, ())
                known |= set(hashes)
            case "remove":  # the ends of prefixes only, as engines do
                ended = [p[p.index(hashes[-1]) :] for p in prompts if hashes and hashes[-1] in p]
                gone = {each for end in ended for each in end}
                index.change(life, (), gone)
                known -= gone
            case "replace":
                index.replace(life, hashes)
                held[life] = set(hashes)
            case _:
                index.forget(life)
                held[life] = set()
        index.check_invariants()
        for each in prompts:
            for told, tokens in index.cached_tokens(each).items():
                assert set(each[: tokens // 64]) <= held[told]
