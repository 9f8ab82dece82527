"""Which sequence owns which KV block. Pure."""

from __future__ import annotations


class BlockPool:
    """A free list and the owner of every block that is not on it."""

    def __init__(self, blocks_total: int) -> None:
        if blocks_total < 1:
            raise ValueError(f"a KV cache has at least one block, not {blocks_total}")
        self.total = blocks_total
        self._free = list(range(blocks_total - 1, -1, -1))
        self._owner: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, owner: int, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} blocks asked of {len(self._free)}"
        taken = [self._free.pop() for _ in range(count)]
        self._owner.update(dict.fromkeys(taken, owner))
        return taken

    def release(self, owner: int, blocks: list[int]) -> None:
        """Give back all of `blocks`, each owned by `owner`; empties the list, so that nothing is freed twice."""
        for block in blocks:
            assert self._owner.pop(block, None) == owner, f"block {block} is not sequence {owner}'s"
            self._free.append(block)
        blocks.clear()

    def owned_by(self, owner: int) -> set[int]:
        return {block for block, other in self._owner.items() if other == owner}

    def check_invariants(self) -> None:
        assert len(self._free) + len(self._owner) == self.total, "a block is lost or doubled"
        assert set(self._free).isdisjoint(self._owner), "a block is free and owned"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
