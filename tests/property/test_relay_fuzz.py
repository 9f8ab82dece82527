"""A short run of what `make relay-fuzz` does for ten minutes."""

from __future__ import annotations

from isthmus_testing.relay_fuzz import fuzz


def test_hostile_words_and_bytes_close_their_sender_and_break_nothing() -> None:
    assert fuzz(60.0, seed=0, most=300) == 300


def test_a_ring_with_a_token_that_another_has_replaced_means_nothing() -> None:
    assert fuzz(60.0, seed=191100188754, most=1) == 1
