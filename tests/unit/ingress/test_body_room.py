from __future__ import annotations

import pytest

from isthmus_ingress.body_room import BodyRoom
from isthmus_ingress.openai.errors import TooManyRequests


def test_bodies_together_are_bounded_and_room_comes_back() -> None:
    room = BodyRoom(100)
    with room.share() as one:
        one(60)
        with room.share() as other:
            other(40)
            with pytest.raises(TooManyRequests):
                other(1)
            with pytest.raises(TooManyRequests):
                one(1)
            assert room.held_bytes == 100
        one(40)
    assert room.held_bytes == 0


def test_one_that_is_alone_may_be_larger_than_all_together() -> None:
    room = BodyRoom(10)
    with room.share() as one:
        for _ in range(5):
            one(10)
        with pytest.raises(TooManyRequests), room.share() as other:
            other(1)
    assert room.held_bytes == 0
