"""NIXL or Mooncake as a contender: ``python -m peer_process --fd N --engine nixl|mooncake``, see `bench.pair`."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from isthmus_kvrelay.bench.children import Message
from isthmus_kvrelay.bench.pair import arguments_of, serve_source, serve_target, source_pool, target_pool
from isthmus_kvrelay.bench.workloads import POOL_BYTES, WORKLOADS, Workload

NIXL_POLL_S = 0.0002
"""Between two looks at a transfer's state: a busy poll would burn the core that the transfer needs."""
MOONCAKE_BATCH = 1024
"""Descriptors in one call; it refuses 4096."""


def address_of(pool: memoryview) -> int:
    return int(np.frombuffer(pool, dtype=np.uint8).ctypes.data)


class NixlEnd:
    def __init__(self, name: str, pool: memoryview, progress_thread: bool) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.pool, self.base = pool, address_of(pool)
        config = nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self.agent = nixl_agent(name, config)
        self._registered = self.agent.register_memory([(self.base, POOL_BYTES, 0, "pool")], "DRAM")


class NixlTarget(NixlEnd):
    def __init__(self, progress_thread: bool) -> None:
        super().__init__("target", target_pool(), progress_thread)
        self.told: Message = {"metadata": self.agent.get_agent_metadata().hex(), "base": self.base}
        if not progress_thread:
            threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        """Somebody has to: over TCP the target takes part in a write."""
        while True:
            self.agent.get_new_notifs()
            time.sleep(NIXL_POLL_S)


class NixlSource(NixlEnd):
    """Descriptor lists are prepared once for each workload, as an engine's connector does."""

    def __init__(self, peer: Message, progress_thread: bool) -> None:
        super().__init__("source", source_pool(), progress_thread)
        name = self.agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        remote = name.decode() if isinstance(name, bytes) else name
        self._lists: dict[str, tuple[Any, Any, Any]] = {}
        for workload in WORKLOADS.values():
            blocks = np.array(workload.scattered(), dtype=np.uint64)
            none = np.zeros(len(blocks), dtype=np.uint64)
            here = np.stack([blocks[:, 0] + np.uint64(self.base), blocks[:, 2], none], axis=1)
            there = np.stack([blocks[:, 1] + np.uint64(peer["base"]), blocks[:, 2], none], axis=1)
            self._lists[workload.name] = (
                self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
                self.agent.prep_xfer_dlist(remote, there, "DRAM"),
                np.arange(len(blocks), dtype=np.int32),
            )

    def transfer(self, workload: Workload) -> None:
        here, there, indices = self._lists[workload.name]
        handle = self.agent.make_prepped_xfer("WRITE", here, indices, there, indices, b"")
        state = self.agent.transfer(handle)
        while state == "PROC":
            time.sleep(NIXL_POLL_S)
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        self.agent.release_xfer_handle(handle)


class MooncakeEnd:
    def __init__(self, pool: memoryview) -> None:
        from mooncake.engine import TransferEngine

        self.pool, self.base = pool, address_of(pool)
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        if self.engine.register_memory(self.base, POOL_BYTES):
            raise RuntimeError("Mooncake does not register memory")


class MooncakeTarget(MooncakeEnd):
    def __init__(self) -> None:
        super().__init__(target_pool())
        self.told: Message = {"peer": f"127.0.0.1:{self.engine.get_rpc_port()}", "base": self.base}


class MooncakeSource(MooncakeEnd):
    def __init__(self, peer: Message) -> None:
        super().__init__(source_pool())
        self._peer, self._lists = peer["peer"], {}
        for workload in WORKLOADS.values():
            here, there, sizes = zip(*workload.scattered(), strict=True)
            self._lists[workload.name] = (
                [self.base + each for each in here],
                [peer["base"] + each for each in there],
                list(sizes),
            )

    def transfer(self, workload: Workload) -> None:
        here, there, sizes = self._lists[workload.name]
        for first in range(0, len(here), MOONCAKE_BATCH):
            part = slice(first, first + MOONCAKE_BATCH)
            if self.engine.batch_transfer_sync_write(self._peer, here[part], there[part], sizes[part]):
                raise RuntimeError("Mooncake's transfer failed")


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--engine", choices=["nixl", "mooncake"], required=True)
        parser.add_argument("--no-progress-thread", action="store_true")

    arguments, peer = arguments_of(more)
    progress = not arguments.no_progress_thread
    end: NixlTarget | MooncakeTarget | NixlSource | MooncakeSource
    if peer is None:
        end = NixlTarget(progress) if arguments.engine == "nixl" else MooncakeTarget()
        serve_target(arguments.fd, end)
    else:
        end = NixlSource(peer, progress) if arguments.engine == "nixl" else MooncakeSource(peer)
        serve_source(arguments.fd, end)
    os._exit(0)  # NIXL's own exit handlers crash


if __name__ == "__main__":
    main()
