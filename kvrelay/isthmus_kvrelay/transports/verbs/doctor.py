"""Is a device fit for lanes? Each finding says what is wrong and the command that mends it. For `isthmus doctor`."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from isthmus_kvrelay.transports.verbs.binding import Binding, Depths, Device, PortFacts
from isthmus_kvrelay.transports.verbs.gids import SYSFS, Gid, GidType, rank_gids, read_gids
from isthmus_kvrelay.transports.verbs.memory import Heads
from isthmus_kvrelay.transports.verbs.transport import DEPTHS

LEAST_MTU_BYTES = 1_024
"""Below it headers and per-packet work take a tenth and more of the rate; a jumbo-frame network gives 4096."""
LEAST_RDMA_CORE = 44
"""Debian 12's, the oldest that this relay was tried with."""


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    ERROR = "error"
    """Lanes over this device cannot be."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    grade: Grade
    what: str
    mend: str = ""
    """The command, or the setting, that mends it."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What does not come from the device."""

    memlock_bytes: int
    """`resource.RLIM_INFINITY` is no limit."""
    rdma_core: int | None
    """Major version; None: not known."""

    @classmethod
    def read(cls) -> HostFacts:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(soft, _rdma_core_version())


def check_device(
    binding: Binding,
    name: str,
    *,
    pool_bytes: int,
    depths: Depths = DEPTHS,
    host: HostFacts | None = None,
    sysfs: Path = SYSFS,
) -> list[Finding]:
    """Everything that can be told without a peer; opens and closes the device."""
    host = host or HostFacts.read()
    findings = [check_rdma_core(host.rdma_core), check_memlock(host.memlock_bytes, pool_bytes=pool_bytes)]
    try:
        device = binding.open(name)
    except OSError as error:
        return [Finding("device", Grade.ERROR, f"{name} cannot be opened: {error}", "rdma link"), *findings]
    try:
        findings += check_port(name, device.port())
        findings.append(check_gids(name, read_gids(name, sysfs=sysfs)))
        findings.append(_check_depth(device, depths))
    except OSError as error:
        findings.append(Finding("device", Grade.ERROR, f"{name} does not answer: {error}", f"rdma link show {name}"))
    finally:
        device.close()
    return findings


def check_rdma_core(version: int | None) -> Finding:
    if version is None:
        return Finding("rdma-core", Grade.WARNING, "the version of rdma-core cannot be told", "dpkg -l libibverbs1")
    if version < LEAST_RDMA_CORE:
        what = f"rdma-core {version} is older than {LEAST_RDMA_CORE}, the oldest that was tried"
        return Finding("rdma-core", Grade.WARNING, what, "apt install --only-upgrade ibverbs-providers libibverbs1")
    return Finding("rdma-core", Grade.OK, f"rdma-core {version}")


def check_memlock(limit_bytes: int, *, pool_bytes: int) -> Finding:
    """The whole pool is pinned once per device."""
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < pool_bytes:
        what = f"{limit_bytes} bytes may be locked, the pool has {pool_bytes}"
        return Finding("memlock", Grade.ERROR, what, "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)")
    return Finding("memlock", Grade.OK, "the pool may be locked into memory")


def check_port(name: str, port: PortFacts) -> list[Finding]:
    if not port.active:
        return [Finding("port", Grade.ERROR, f"the port of {name} is not active", f"rdma link show {name}")]
    findings = [Finding("port", Grade.OK, f"{name} is active")]
    if port.mtu_bytes < LEAST_MTU_BYTES:
        what = f"packets of {name} carry {port.mtu_bytes} bytes"
        mend = "ip link set dev INTERFACE mtu 4200, and the same on every switch and peer"
        findings.append(Finding("mtu", Grade.WARNING, what, mend))
    else:
        findings.append(Finding("mtu", Grade.OK, f"MTU {port.mtu_bytes}"))
    return findings


def check_gids(name: str, gids: list[Gid]) -> Finding:
    ranked = rank_gids(gids)
    if not ranked:
        return Finding("gid", Grade.ERROR, f"{name} has no address (GID)", "ip addr add ADDRESS/24 dev INTERFACE")
    best = ranked[0]
    if best.type != GidType.ROCE_V2 and best.interface:
        what = f"{name} has no RoCE v2 address: {best.text} is {best.type}, which no router passes"
        return Finding("gid", Grade.WARNING, what, f"cma_roce_mode -d {name} -p 1 -m 2")
    if best.address.is_link_local and best.interface:
        what = f"the best address of {name} is link-local: peers on other networks cannot reach it"
        return Finding("gid", Grade.WARNING, what, f"ip addr add ADDRESS/24 dev {best.interface}")
    return Finding("gid", Grade.OK, f"GID {best.index}, {best.text}, {best.type}")


def _check_depth(device: Device, depths: Depths) -> Finding:
    """Only making one tells what a device grants."""
    heads = Heads(1)
    region = device.register(heads.address, heads.size_bytes, remote_write=False)
    try:
        queue_pair = device.queue_pair(depths, region, heads.address)
    except OSError as error:
        what = f"{device.name} grants no queue pair of {depths.send} and {depths.receive} work requests: {error}"
        return Finding("depth", Grade.ERROR, what, "use another device: ISTHMUS_RELAY_DEVICES")
    else:
        queue_pair.close()
        return Finding("depth", Grade.OK, f"queue pairs of {depths.send} and {depths.receive} work requests")
    finally:
        region.close()
        heads.close()


def _rdma_core_version(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> int | None:
    try:
        done = run(
            ["dpkg-query", "--show", "--showformat", "${Version}", "libibverbs1"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"(?:\d+:)?(\d+)", done.stdout)
    return int(found[1]) if found else None
