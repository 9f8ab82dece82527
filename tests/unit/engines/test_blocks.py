"""Blocks that are kept, and what others are told of them."""

from __future__ import annotations

import pytest

from isthmus_shared.engines.blocks import BlockPool
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.prefix import PrefixChain, prefix_hashes

A, B, C, D = b"a", b"b", b"c", b"d"


def kept(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks of one holder, each with its name."""
    blocks = pool.allocate(len(names))
    return [pool.keep(block, name, ()) for block, name in zip(blocks, names, strict=True)]


def test_the_longest_run_from_the_beginning_is_found() -> None:
    pool = BlockPool(4)
    blocks = kept(pool, A, B, C)
    assert pool.find([A, B, D, C]) == blocks[:2]
    assert pool.find([B, C]) == blocks[1:]
    assert pool.find([D, A]) == []


def test_idle_blocks_are_room_and_go_last_ones_first() -> None:
    pool = BlockPool(4)
    older, newer = kept(pool, A, B), kept(pool, C, D)
    pool.release(older)
    pool.release(newer)
    assert (pool.free, pool.idle, pool.held) == (4, 4, 0)
    pool.allocate(3)
    assert [bool(pool.find([name])) for name in (A, B, C, D)] == [False, False, True, False]


def test_a_block_that_is_taken_over_outlives_its_first_holder() -> None:
    pool = BlockPool(2)
    mine = kept(pool, A)
    theirs = pool.find([A])
    pool.take_over(theirs)
    pool.release(mine)
    assert (pool.free, pool.idle) == (1, 0)
    pool.release(theirs)
    assert (pool.free, pool.idle) == (2, 1)
    pool.check_invariants([])


def test_two_that_computed_the_same_end_up_with_one_block() -> None:
    pool = BlockPool(3)
    [mine] = kept(pool, A)
    [theirs] = kept(pool, A)
    assert mine == theirs
    assert (pool.free, pool.held) == (2, 1)
    pool.check_invariants([[mine], [theirs]])


def test_what_is_in_doubt_is_nobodys_prefix() -> None:
    pool = BlockPool(3)
    held = kept(pool, A)
    pool.release(kept(pool, B))
    pool.forget_all()
    assert (pool.find([A]), pool.find([B]), pool.idle) == ([], [], 0)
    pool.release(held)
    assert pool.free == 3
    pool.check_invariants([])


def test_what_comes_and_goes_between_two_takings_is_not_told() -> None:
    log = PrefixLog()
    log.stored([A, B])
    log.removed([B])
    assert log.take().stored == (A,)
    log.removed([A])
    log.stored([A])
    assert not log.take()
    log.stored([A])  # a second block that ends beyond the same prefix
    log.removed([A])
    assert not log.take()
    assert log.snapshot(9) == (A,)


def test_too_many_changes_are_given_up_and_said_to_be() -> None:
    log = PrefixLog(max_changes=2)
    log.stored([A, B, C])
    changes = log.take()
    assert changes
    assert (changes.stored, changes.complete) == ((), False)
    assert log.snapshot(9) == (A, B, C)
    assert log.snapshot(2) == (A, B)
    log.removed([C])
    assert log.take().complete


def test_a_hash_says_all_tokens_before_it_and_the_salt() -> None:
    tokens = list(range(300))
    hashes = prefix_hashes(tokens, "s")
    assert [len(hash_) for hash_ in hashes] == [8] * 4
    assert prefix_hashes(tokens[:256], "s") == hashes == prefix_hashes([*tokens[:256], 9], "s")
    for place in (0, 63, 64, 255):
        other = prefix_hashes([*tokens[:place], 7777, *tokens[place + 1 :]], "s")
        assert [a == b for a, b in zip(hashes, other, strict=True)] == [i < place // 64 for i in range(4)]
    assert set(hashes).isdisjoint(prefix_hashes(tokens, "t"))
    assert len(prefix_hashes([1] * 64 * 3000, "")) == 2048


@pytest.mark.parametrize("step", [1, 5, 64, 200])
def test_a_chain_that_grows_comes_to_the_same_hashes(step: int) -> None:
    tokens = [(i * 7) % 1000 for i in range(200)]
    whole = PrefixChain("s", block_tokens=16, digest_bytes=32)
    grown = PrefixChain("s", block_tokens=16, digest_bytes=32)
    for end in range(0, 201, step):
        grown.extend(tokens[:end])
    grown.extend(tokens, blocks=5)
    assert grown.hashes[:12] == whole.extend(tokens)[: len(grown.hashes)]
    assert whole.extend(tokens, blocks=3) == whole.hashes
    assert len(whole.hashes) == 12
