"""Which of a device's addresses lanes should use. The kernel's files say the same whatever the binding."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address
from pathlib import Path

from isthmus_kvrelay.transports.verbs.binding import PORT

SYSFS = Path("/sys/class/infiniband")
MAX_HOLES = 32
"""Empty entries in a row after which no more are read: tables have up to a thousand, the kernel takes the first free
one, and a read of each costs a millisecond on some machines. Beyond it an index can still be named."""


class GidType(StrEnum):
    ROCE_V2 = "RoCE v2"
    ROCE_V1 = "IB/RoCE v1"
    """On InfiniBand proper the kernel calls it so too."""


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    address: IPv6Address
    type: str
    """As the kernel names it, see `GidType`."""
    interface: str = ""
    """The network interface behind it, if there is one."""

    @property
    def text(self) -> str:
        mapped = self.address.ipv4_mapped
        return str(mapped or self.address)


def rank_gids(gids: Iterable[Gid]) -> list[Gid]:
    """The best first: RoCE v2 (it is routable), then IPv4 before global IPv6 before link-local, then the lowest index.

    Unusable ones (all zero, or a prefix with no interface part) are left out.
    """

    def rank(gid: Gid) -> tuple[int, int, int]:
        if gid.address.ipv4_mapped is not None:
            scope = 0
        else:
            scope = 2 if gid.address.is_link_local else 1
        return (0 if gid.type == GidType.ROCE_V2 else 1), scope, gid.index

    return sorted((gid for gid in gids if int(gid.address) & (2**64 - 1)), key=rank)


def read_gids(device: str, *, sysfs: Path = SYSFS) -> list[Gid]:
    """The GIDs that the kernel has for the device, in order of index; `OSError` where there is no such device."""
    port = sysfs / device / "ports" / str(PORT)
    found: list[Gid] = []
    holes = 0
    for name in sorted(os.listdir(port / "gids"), key=int):
        address = IPv6Address((port / "gids" / name).read_text().strip())
        kind = _attribute(port, "types", name) if int(address) else None
        if kind is None:
            holes += 1
            if holes > MAX_HOLES:
                break
            continue
        holes = 0
        found.append(Gid(int(name), address, kind, _attribute(port, "ndevs", name) or ""))
    return found


def read_gid(device: str, index: int, *, sysfs: Path = SYSFS) -> Gid | None:
    """The one at that index; None when it is empty or there is none."""
    port = sysfs / device / "ports" / str(PORT)
    try:
        address = IPv6Address((port / "gids" / str(index)).read_text().strip())
    except OSError:
        return None
    kind = _attribute(port, "types", str(index))
    return Gid(index, address, kind, _attribute(port, "ndevs", str(index)) or "") if kind and int(address) else None


def _attribute(port: Path, which: str, index: str) -> str | None:
    try:
        return (port / "gid_attrs" / which / index).read_text().strip()
    except OSError:  # the kernel answers EINVAL for an entry that is not in use
        return None
