"""Receiver-issued credit. At every moment and for each kind: granted = in flight + consumed + returned."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CreditAccount:
    """What a receiver has granted of one kind since it started, in that kind's own unit."""

    granted: int = 0
    consumed: int = 0
    returned: int = 0

    def grant(self, amount: int) -> None:
        self.granted += amount

    def consume(self, amount: int) -> None:
        """It served its purpose: the chunk has landed, the KV is in the engine."""
        self.consumed += amount

    def take_back(self, amount: int) -> None:
        """The flow ended first."""
        self.returned += amount

    @property
    def in_flight(self) -> int:
        return self.granted - self.consumed - self.returned

    def check_in_flight(self, held: int) -> None:
        """`held`: what the flows themselves say is out."""
        assert min(self.granted, self.consumed, self.returned) >= 0
        assert self.in_flight == held, (self, held)


@dataclass(slots=True)
class Credits:
    """The four kinds; staging is counted in slots and in bytes."""

    staging_slots: CreditAccount = field(default_factory=CreditAccount)
    staging_bytes: CreditAccount = field(default_factory=CreditAccount)
    work_requests: CreditAccount = field(default_factory=CreditAccount)
    """One per chunk: what the lane's transport can have under way."""
    kv_blocks: CreditAccount = field(default_factory=CreditAccount)
    """Blocks of the consumer's engine, from the grant of a flow until its KV is in them."""
    host_us: CreditAccount = field(default_factory=CreditAccount)
    """Microseconds of this host that receiving the chunk will cost."""

    def grant_chunk(self, size_bytes: int, host_us: int) -> None:
        for account, amount in self._of_chunk(size_bytes, host_us):
            account.grant(amount)

    def consume_chunk(self, size_bytes: int, host_us: int) -> None:
        for account, amount in self._of_chunk(size_bytes, host_us):
            account.consume(amount)

    def take_back_chunk(self, size_bytes: int, host_us: int) -> None:
        for account, amount in self._of_chunk(size_bytes, host_us):
            account.take_back(amount)

    def _of_chunk(self, size_bytes: int, host_us: int) -> tuple[tuple[CreditAccount, int], ...]:
        return (
            (self.staging_slots, 1),
            (self.staging_bytes, size_bytes),
            (self.work_requests, 1),
            (self.host_us, host_us),
        )
