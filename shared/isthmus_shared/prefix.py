"""Prefixes of prompts by name: chained hashes of whole blocks of tokens. Pure.

A block's hash covers every token from the prompt's start to the block's end, and the salt: two prompts share a hash
exactly when they share that prefix and their salts are equal. Without the salt nobody can say what a hash stands for.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from isthmus_shared.messages.route import MAX_PREFIX_HASHES, PREFIX_BLOCK_TOKENS, PREFIX_HASH_BYTES

_DOMAIN = b"isthmus-prefix"
_TOKEN = "I"
_TOKEN_BYTES = array(_TOKEN).itemsize


class PrefixChain:
    """The hashes of one sequence's whole blocks, in order; they grow with it."""

    __slots__ = ("_block_tokens", "_digest_bytes", "_root", "hashes")

    def __init__(self, salt: str, *, block_tokens: int, digest_bytes: int) -> None:
        self._block_tokens, self._digest_bytes = block_tokens, digest_bytes
        self._root = hashlib.blake2b(salt.encode(), digest_size=digest_bytes, person=_DOMAIN).digest()
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int], *, blocks: int | None = None) -> list[bytes]:
        """Hashes of the first `blocks` whole blocks of `token_ids` (None: of all), of which those known so far
        must be a prefix. Token ids are below 2^32."""
        width, known = self._block_tokens, len(self.hashes)
        count = len(token_ids) // width if blocks is None else min(blocks, len(token_ids) // width)
        if count <= known:
            return self.hashes
        data = _as_bytes(token_ids[known * width : count * width])
        parent = self.hashes[-1] if known else self._root
        size, step = self._digest_bytes, width * _TOKEN_BYTES
        for at in range(0, len(data), step):
            parent = hashlib.blake2b(parent + data[at : at + step], digest_size=size).digest()
            self.hashes.append(parent)
        return self.hashes


def wire_chain(salt: str) -> PrefixChain:
    """As processes tell each other of prefixes (`RouteRequest.prefix`)."""
    return PrefixChain(salt, block_tokens=PREFIX_BLOCK_TOKENS, digest_bytes=PREFIX_HASH_BYTES)


def prefix_hashes(token_ids: Sequence[int], salt: str) -> tuple[bytes, ...]:
    """Of a prompt's whole blocks of `PREFIX_BLOCK_TOKENS`, at most `MAX_PREFIX_HASHES`; 8 bytes each."""
    return tuple(wire_chain(salt).extend(token_ids, blocks=MAX_PREFIX_HASHES))


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian, so that processes on other machines come to the same hashes."""
    words = array(_TOKEN, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
