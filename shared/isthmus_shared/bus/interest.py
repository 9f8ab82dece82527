"""What the NATS adapter keeps of a subscription, over all connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.subscription import Subscription as NatsSubscription

from isthmus_shared.bus.port import BusMessage


@dataclass(eq=False, slots=True)
class Interest:
    """One subscription, and nats-py's handle of it (a new one after each new client)."""

    subject: str
    queue: str | None
    deliver: Callable[[BusMessage], None]
    end: Callable[[], None]
    handle: NatsSubscription | None = None
    withdrawn: bool = False
