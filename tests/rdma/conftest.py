"""Real verbs: linked devices, each binding. `make rdma-test` brings all; elsewhere they skip and say why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from isthmus_kvrelay.transports.verbs.binding import BINDINGS, Binding, load_binding
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_testing.rdma import Link, linked_devices


@dataclass(frozen=True)
class Fabric:
    """Devices, `one` linked to `two` and `three` to `four`, and one way to use them."""

    name: str
    one: str
    two: str
    three: str
    four: str

    def load(self) -> Binding:
        return load_binding((self.name,))

    def at(self, *devices: str, **options: Any) -> dict[str, Any]:
        """Options of `daemon_settings` for a relay with those devices, whose lanes are over verbs or nothing."""
        load = options.pop("load", partial(load_binding, (self.name,)))
        return {"verbs": VerbsSettings(devices=devices, **options), "load": load}


@pytest.fixture(params=BINDINGS)
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return Fabric(request.param, *linked_devices(request.param))


@pytest.fixture
def link(fabric: Fabric) -> Iterator[Link]:
    """The wire between devices one and two; whole again afterwards."""
    wire = Link()
    yield wire
    wire.mend()
