"""Which of a device's addresses lanes should use. The kernel's files say the same whatever the binding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address
from pathlib import Path

from isthmus_kvrelay.transports.verbs.binding import PORT

SYSFS = Path("/sys/class/infiniband")


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
    """Every GID that the kernel has for the device, in order of index; `OSError` where there is no such device."""
    port = sysfs / device / "ports" / str(PORT)
    found = []
    for entry in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        address = IPv6Address(entry.read_text().strip())
        kind = _attribute(port, "types", entry.name)
        if int(address) and kind is not None:
            found.append(Gid(int(entry.name), address, kind, _attribute(port, "ndevs", entry.name) or ""))
    return found


def _attribute(port: Path, which: str, index: str) -> str | None:
    try:
        return (port / "gid_attrs" / which / index).read_text().strip()
    except OSError:  # the kernel answers EINVAL for an entry that is not in use
        return None
