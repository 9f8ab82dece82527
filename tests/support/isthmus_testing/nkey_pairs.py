"""Nkeys of bus users, made anew."""

from __future__ import annotations

import secrets

import nkeys


def nkey_pair() -> tuple[str, str]:
    """(seed, public key)."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    public: bytes = nkeys.from_seed(bytearray(seed)).public_key
    return seed.decode(), public.decode()
