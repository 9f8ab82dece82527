"""Per-client room: flows of one client wait in line for it, and no client waits for another's.

Used for the decode engine's KV blocks (the limit is what the engine last said) and for a worker's share of the pool
(the limit is fixed). A flow takes all that it needs at once, so that one which got through never waits here again.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus_kvrelay.core.names import ClientId, FlowKey


class Gate:
    def __init__(self, limit: int | None = None) -> None:
        """`limit`: of a client for which none was set; None is no limit."""
        self._default = limit
        self._limits: dict[ClientId, int] = {}
        self._held: dict[ClientId, int] = {}
        self._waiting: dict[ClientId, dict[FlowKey, int]] = {}

    def set_limit(self, client: ClientId, limit: int | None) -> None:
        if limit is None:
            self._limits.pop(client, None)
        else:
            self._limits[client] = limit

    def limit(self, client: ClientId) -> int | None:
        return self._limits.get(client, self._default)

    def held(self, client: ClientId) -> int:
        return self._held.get(client, 0)

    @property
    def held_by_all(self) -> int:
        return sum(self._held.values())

    def ask(self, client: ClientId, key: FlowKey, amount: int) -> None:
        self._waiting.setdefault(client, {})[key] = amount

    def leave(self, client: ClientId, key: FlowKey) -> None:
        """Stop waiting; nothing if it does not."""
        line = self._waiting.get(client, {})
        line.pop(key, None)
        if not line:
            self._waiting.pop(client, None)

    def admit(self) -> Iterator[tuple[FlowKey, int]]:
        """Those for which there is room now, each client's in order of arrival."""
        for client in list(self._waiting):
            line = self._waiting[client]
            while line:
                key, amount = next(iter(line.items()))
                limit = self.limit(client)
                if limit is not None and self.held(client) + amount > limit:
                    break
                del line[key]
                self._held[client] = self.held(client) + amount
                yield key, amount
            if not line:
                self._waiting.pop(client, None)

    def give_back(self, client: ClientId, amount: int) -> None:
        left = self.held(client) - amount
        assert left >= 0, "gave back more than it held"
        if left:
            self._held[client] = left
        else:
            self._held.pop(client, None)

    def used_up(self, client: ClientId, amount: int) -> None:
        """Given back, and gone from the limit too: the owner will set a new one that says so."""
        self.give_back(client, amount)
        if client in self._limits:
            self._limits[client] -= amount

    def waiting(self) -> Iterator[FlowKey]:
        for line in self._waiting.values():
            yield from line

    def check_invariants(self) -> None:
        assert all(amount > 0 for amount in self._held.values())
        assert all(line for line in self._waiting.values())
