"""What tests share: a bus server per test, waiting without sleeping, a check that nothing is left behind."""

from isthmus_testing.waiting import eventually

__all__ = ["eventually"]
