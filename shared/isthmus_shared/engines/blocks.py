"""Which sequences hold which KV block, and what is kept of blocks that nobody holds. Pure.

A block is free (nothing of worth is in it), held (by one sequence or, if it has a name, by several), or idle: nobody
holds it, but it has a name, and who wants that content may take it over. Idle blocks count as room: when the free ones
are used up they are given away, least recently held first.

A name stands for all tokens from the sequence's start to the block's end. Who holds a block holds those before it too,
and lets go of the last one first; so a block never stays without those before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus_shared.engines.prefix_log import PrefixLog


@dataclass(frozen=True, slots=True)
class _Name:
    name: bytes
    prefixes: tuple[bytes, ...]
    """Those that end in it, as others are told of them."""


class BlockPool:
    def __init__(self, blocks_total: int) -> None:
        if blocks_total < 1:
            raise ValueError(f"a KV cache has at least one block, not {blocks_total}")
        self.total = blocks_total
        self.prefixes = PrefixLog()
        self._free = list(range(blocks_total - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block: dict[bytes, int] = {}
        self._name: dict[int, _Name] = {}

    @property
    def free(self) -> int:
        """Blocks that can be had: free and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Blocks with nothing in them, for one holder."""
        assert count <= self.free, f"{count} blocks asked of {self.free}"
        taken = []
        for _ in range(count):
            if not self._free:
                self._forget(next(iter(self._idle)))
            taken.append(self._free.pop())
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, blocks: list[int]) -> None:
        """One holder lets go of all of `blocks`; empties the list, so that nothing is freed twice."""
        while blocks:
            block = blocks.pop()
            holders = self._holders.pop(block) - 1
            if holders:
                self._holders[block] = holders
            elif block in self._name:
                self._idle[block] = None
            else:
                self._free.append(block)

    # -- names

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of `names`, from the first on, that is here. Takes nothing."""
        found = []
        for name in names:
            block = self._block.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of them would be room no more if somebody took them over."""
        return sum(block in self._idle for block in blocks)

    def take_over(self, blocks: Iterable[int]) -> None:
        """One more holder for each of those, which have names."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def keep(self, block: int, name: bytes, prefixes: tuple[bytes, ...]) -> int:
        """That held block is full: it stays the holder's, and gets that name.

        If another has the name already, its holder now holds that one instead: returns which.
        """
        known = self._block.setdefault(name, block)
        if known != block:
            self.take_over([known])
            self.release([block])
        elif block not in self._name:
            self._name[block] = _Name(name, prefixes)
            self.prefixes.stored(prefixes)
        return known

    def forget_all(self) -> None:
        """What is in the blocks is in doubt: nobody may take over any of them."""
        for block in [*self._name]:
            self._forget(block)

    def _forget(self, block: int) -> None:
        named = self._name.pop(block)
        del self._block[named.name]
        self.prefixes.removed(named.prefixes)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    # -- views

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def held(self) -> int:
        return len(self._holders)

    def shared(self, block: int) -> bool:
        """Whether what is in it is somebody else's too, or kept: it must not be written."""
        return block in self._name or self._holders.get(block, 0) > 1

    def check_invariants(self, holdings: Iterable[Sequence[int]]) -> None:
        """`holdings`: the blocks of every sequence, in its order."""
        assert len(self._free) + len(self._holders) + len(self._idle) == self.total, "a block is lost or doubled"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert set(self._free).isdisjoint(self._holders), "a block is free and held"
        assert set(self._idle).isdisjoint(self._holders), "a block is idle and held"
        assert set(self._free).isdisjoint(self._name), "a free block has a name"
        assert set(self._idle) <= set(self._name), "an idle block has no name"
        assert Counter(block for blocks in holdings for block in blocks) == self._holders, "holders are miscounted"
        assert all(block in self._name for block, count in self._holders.items() if count > 1), (
            "two may write one block"
        )
        assert {block: named.name for block, named in self._name.items()} == {b: n for n, b in self._block.items()}
