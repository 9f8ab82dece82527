"""The memory that adapters read and write: the node's pool, and a header for each slot, one way and the other."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.verbs.binding import Binding, Device, PortFacts, Region
from isthmus_kvrelay.transports.verbs.gids import Gid, rank_gids, read_gid, read_gids
from isthmus_kvrelay.wire import HEADER_BYTES
from isthmus_shared.errors import ConfigInvalid

SLOT_BITS = 20
"""Of an immediate; the other 12 are the low bits of the slot's use, so that a late completion is told from the next."""
MAX_SLOTS = 1 << SLOT_BITS
_USE_MASK = (1 << (32 - SLOT_BITS)) - 1


def immediate(slot: int, use: int) -> int:
    return (use & _USE_MASK) << SLOT_BITS | slot


def slot_of(imm: int) -> int:
    return imm & (MAX_SLOTS - 1)


class Heads:
    """One header per slot, and a last one for probes."""

    def __init__(self, slots: int) -> None:
        self.size_bytes = (slots + 1) * HEADER_BYTES
        self._map = mmap.mmap(-1, self.size_bytes)
        self._view = memoryview(self._map)
        self.address = address_of(self._view)

    def put(self, slot: int, header: bytes) -> None:
        self._view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = header

    def get(self, slot: int) -> bytes:
        return bytes(self._view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])

    def close(self) -> None:
        self._view.release()
        self._map.close()


class PoolMemory:
    """The pool as adapters see it. Made once per relay, closed after every device."""

    def __init__(self, pool: SharedPool) -> None:
        self.pool, self.slot_bytes = pool, pool.slot_bytes
        self.slots = os.fstat(pool.fd).st_size // pool.slot_bytes
        if self.slots > MAX_SLOTS:
            raise ConfigInvalid(
                f"a pool of {self.slots} slots where lanes over verbs can name {MAX_SLOTS}",
                todo="raise ISTHMUS_RELAY_SLOT_BYTES",
                param="slot_bytes",
            )
        self.address = address_of(pool.view(0, 0, pool.slot_bytes))
        self.incoming, self.outgoing = Heads(self.slots), Heads(self.slots)

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def close(self) -> None:
        self.incoming.close()
        self.outgoing.close()


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@dataclass(slots=True)
class Adapter:
    """A device of this node, open, with the whole pool registered: once per device, for every lane."""

    device: Device
    port: PortFacts
    gid: Gid
    pool: Region
    incoming: Region
    outgoing: Region

    @property
    def name(self) -> str:
        return self.device.name

    def close(self) -> None:
        for region in (self.pool, self.incoming, self.outgoing):
            region.close()
        self.device.close()


def open_adapter(binding: Binding, name: str, memory: PoolMemory, *, gid_index: int | None = None) -> Adapter:
    """Raises `ConfigInvalid` saying what is wrong with the device. Registering takes about a second per 4 GiB."""
    try:
        device = binding.open(name)
    except OSError as error:
        raise ConfigInvalid(
            f"the RDMA device {name!r} cannot be opened",
            why=str(error),
            todo="`rdma link` lists what there is; set ISTHMUS_RELAY_DEVICES",
            param="devices",
        ) from error
    regions: list[Region] = []
    try:
        port = device.port()
        ranked = rank_gids(read_gids(name)) if gid_index is None else [read_gid(name, gid_index)]
        chosen = ranked[0] if ranked else None
        if not port.active or chosen is None:
            why = "it has no such address (GID)" if port.active else "its port is not active"
            raise ConfigInvalid(f"the RDMA device {name!r} cannot be used", why=why, todo="see `isthmus doctor`")
        regions.append(device.register(memory.address, memory.size_bytes, remote_write=True))
        regions.append(device.register(memory.incoming.address, memory.incoming.size_bytes, remote_write=True))
        regions.append(device.register(memory.outgoing.address, memory.outgoing.size_bytes, remote_write=False))
        return Adapter(device, port, chosen, *regions)
    except (OSError, ConfigInvalid) as error:
        for region in regions:
            region.close()
        device.close()
        if isinstance(error, ConfigInvalid):
            raise
        raise ConfigInvalid(
            f"the RDMA device {name!r} refuses the pool of {memory.size_bytes} bytes",
            why=str(error),
            todo="raise the locked-memory limit: `ulimit -l unlimited`, or LimitMEMLOCK=infinity",
        ) from error
