"""The linked RDMA devices that tests/rdma needs, or a loud skip; and ways to make them misbehave."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence

import pytest

from isthmus_kvrelay.transports.verbs.binding import (
    BINDINGS,
    Binding,
    Completion,
    Depths,
    Device,
    PathSettings,
    PortFacts,
    QpAddress,
    QueuePair,
    Region,
    Write,
    load_binding,
)
from isthmus_shared.errors import ConfigInvalid

DEVICES = "ISTHMUS_TEST_RDMA_DEVICES"
"""Four names, separated by commas: the first is linked to the second, the third to the fourth. `make rdma-test` sets it
in its guest; where it is set, a missing device is a failure and no skip."""
HOW = "`make rdma-test` brings Soft-RoCE devices in a User-Mode-Linux guest"


def require_devices() -> None:
    """For the head of a module whose tests need them: skips it where there are none, and says what is missing."""
    if DEVICES in os.environ:
        return
    reasons = []
    for name in BINDINGS:
        try:
            reasons.append(f"{name} has the devices {load_binding((name,)).devices()}")
        except ConfigInvalid as error:
            reasons.append(error.why)
        except OSError as error:
            reasons.append(f"{name}: {error}")
    why = f"{DEVICES} names no linked RDMA devices ({'; '.join(reasons)}); {HOW}"
    pytest.skip(why, allow_module_level=True)


def linked_devices(binding: str) -> tuple[str, ...]:
    """Names of devices, two by two linked, to be used through that binding; a missing one is an error."""
    names = tuple(os.environ[DEVICES].split(","))
    missing = set(names) - set(load_binding((binding,)).devices())
    assert not missing, f"{DEVICES} names {missing}, which {binding} does not find"
    return names


class Link:
    """The guest's wire between its first two devices (see tools/rdma/guest.sh). TCP over loopback does not use it."""

    def __init__(self, *interfaces: str) -> None:
        self._interfaces = interfaces or ("v0", "v1")
        self._cut = False

    def cut(self) -> None:
        """Every packet is lost from now on, both ways."""
        self._tc("add", "netem", "loss", "100%")
        self._cut = True

    def mend(self) -> None:
        if self._cut:
            self._tc("del")
            self._cut = False

    def _tc(self, verb: str, *how: str) -> None:
        for interface in self._interfaces:
            subprocess.run(["tc", "qdisc", verb, "dev", interface, "root", *how], check=True)


class Tampered:
    """A binding whose devices and queue pairs a test has changed; everything else is the real one's."""

    def __init__(
        self,
        real: Binding,
        *,
        region: Callable[[Region, int], Region] | None = None,
        queue_pair: Callable[[QueuePair], QueuePair] | None = None,
    ) -> None:
        """`region`: gets each region and its size in bytes."""
        self.name, self.version = f"tampered {real.name}", real.version
        self._real, self._region, self._queue_pair = real, region, queue_pair

    def devices(self) -> list[str]:
        return self._real.devices()

    def open(self, device: str) -> Device:
        return _TamperedDevice(self._real.open(device), self._region, self._queue_pair)


class _TamperedDevice:
    def __init__(
        self,
        real: Device,
        region: Callable[[Region, int], Region] | None,
        queue_pair: Callable[[QueuePair], QueuePair] | None,
    ) -> None:
        self._real, self._region, self._queue_pair = real, region, queue_pair
        self._regions: dict[int, Region] = {}

    @property
    def name(self) -> str:
        return self._real.name

    def port(self) -> PortFacts:
        return self._real.port()

    def register(self, address: int, size_bytes: int, *, remote_write: bool) -> Region:
        real = self._real.register(address, size_bytes, remote_write=remote_write)
        shown = self._region(real, size_bytes) if self._region else real
        self._regions[id(shown)] = real
        return shown

    def queue_pair(self, depths: Depths, receive_into: Region, receive_address: int) -> QueuePair:
        made = self._real.queue_pair(depths, self._regions[id(receive_into)], receive_address)
        return self._queue_pair(made) if self._queue_pair else made

    def close(self) -> None:
        self._real.close()


class WrongKey:
    """A region that tells peers a key that opens nothing."""

    def __init__(self, real: Region) -> None:
        self._real = real

    @property
    def lkey(self) -> int:
        return self._real.lkey

    @property
    def rkey(self) -> int:
        return self._real.rkey ^ 0x5A5A00

    def close(self) -> None:
        self._real.close()


class _QueuePair:
    """Passes everything on."""

    def __init__(self, real: QueuePair) -> None:
        self._real = real

    @property
    def number(self) -> int:
        return self._real.number

    @property
    def fd(self) -> int:
        return self._real.fd

    def prepare(self) -> None:
        self._real.prepare()

    def connect(self, peer: QpAddress, *, psn: int, gid_index: int, mtu: int, path: PathSettings) -> None:
        self._real.connect(peer, psn=psn, gid_index=gid_index, mtu=mtu, path=path)

    def post_receives(self, count: int) -> None:
        self._real.post_receives(count)

    def post_writes(self, writes: Sequence[Write]) -> None:
        self._real.post_writes(writes)

    def completions(self) -> list[Completion]:
        return self._real.completions()

    def close(self) -> None:
        self._real.close()


class NeverReady(_QueuePair):
    """Says that it has receives, and has none."""

    def post_receives(self, count: int) -> None:
        pass


class Damaging(_QueuePair):
    """Changes one bit of each payload after its checksum was taken."""

    def post_writes(self, writes: Sequence[Write]) -> None:
        for write in writes:
            if write.imm is not None:
                ctypes.c_ubyte.from_address(write.local_address).value ^= 1
        self._real.post_writes(writes)
