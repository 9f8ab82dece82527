"""How the bus treats messages: faults change it and set it back."""

from __future__ import annotations

import random
from dataclasses import dataclass

from isthmus_shared.messages import subjects

CALM_DELAY_S = 0.002
"""A healthy bus; without any delay, too little could happen between two messages."""
LINGER_S = 1.5

_STEPS = f"{subjects.ROOT}.ingress."
_WORK = f"{subjects.ROOT}.worker."


@dataclass
class Weather:
    """Now."""

    rng: random.Random
    delay_s: float = CALM_DELAY_S
    """Longest way up; each message takes something between nothing and this."""
    spread_s: float = 0.0
    """Longest way down: how much later one listener hears a message than another."""
    shed_chance: float = 0.0
    """Of a step message: its subscriber was too slow."""
    repeat_chance: float = 0.0
    """Of any message: it comes twice."""
    linger_chance: float = 0.0
    """Of a request to a worker: it comes again, up to `LINGER_S` later, as from a buffer that is flushed after an
    outage."""

    def take_s(self) -> float:
        return self.rng.uniform(0, self.delay_s)

    def copies(self, subject: str) -> int:
        if self.shed_chance and subject.startswith(_STEPS) and self.rng.random() < self.shed_chance:
            return 0
        return 2 if self.repeat_chance and self.rng.random() < self.repeat_chance else 1

    def lingers(self, subject: str) -> bool:
        return bool(self.linger_chance) and subject.startswith(_WORK) and self.rng.random() < self.linger_chance
