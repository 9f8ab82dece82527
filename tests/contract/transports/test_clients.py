"""Who may be a relay's client, and what a client that breaks the rules gets."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest

from isthmus_kvrelay import control
from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.core.events import FlowKey
from isthmus_shared.errors import Cancelled, DeadlineExceeded, PartyLost
from isthmus_testing import eventually
from isthmus_testing.relay import G1, client_of, daemon_settings, manifest_of, new_transfer, running, worker_ref, write

NOBODY = 65_534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
async def test_another_user_is_refused_before_it_sees_the_pool() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        async with running(daemon_settings(Path(folder), "a")) as a:
            path = a.daemon.settings.socket
            path.chmod(0o666)
            with socket.socket(socket.AF_UNIX) as sock:
                os.seteuid(NOBODY)
                try:
                    sock.connect(str(path))  # the kernel notes who connects, now
                finally:
                    os.seteuid(0)
                data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 65_536, 1)
            assert fds == []
            assert b"own user" in data
            assert a.daemon.clients() == ()


async def test_a_client_that_vanishes_is_news_and_one_that_leaves_is_not(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        async with client_of(a, "leaves"):
            await eventually(lambda: len(a.daemon.clients()) == 1)
        await eventually(lambda: a.daemon.clients() == ())
        hello = control.Hello(worker=worker_ref(a, "vanishes"))
        _, writer = await asyncio.open_unix_connection(str(a.daemon.settings.socket))
        writer.write(control.encode(hello))
        await eventually(lambda: len(a.daemon.clients()) == 1)
        writer.transport.abort()
        await eventually(lambda: [worker.worker_id for worker, _ in a.lost] == ["vanishes"])


async def test_a_worker_that_reconnects_before_its_old_connection_ends_is_not_lost(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        worker = worker_ref(a)
        path = str(a.daemon.settings.socket)
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(control.encode(control.Hello(worker=worker)))
        await eventually(lambda: len(a.daemon.clients()) == 1)
        again = await RelayClient.connect(path, worker=worker, timeout_s=5)
        assert a.daemon.clients() == (worker,)
        writer.transport.abort()
        await eventually(lambda: a.daemon.stats().clients == 1)
        assert a.lost == []
        await again.close()


async def test_a_client_at_fault_is_closed_and_gives_everything_back(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a, client_of(a, "good") as good:
        path = str(a.daemon.settings.socket)
        reader, writer = await asyncio.open_unix_connection(path)
        names = control.names_of(FlowKey(new_transfer(), G1))
        writer.write(control.encode(control.Hello(worker=worker_ref(a, "bad"))))
        writer.write(
            control.encode(control.OpenSinkRequest(**names, total_bytes=8, manifest="m", deadline_s=60, wait_s=1))
        )
        writer.write(control.encode(control.SealNotice(**names)))
        async with asyncio.timeout(5):
            assert b"sealed before" in await reader.read()
        writer.close()
        await eventually(a.at_rest)
        assert [worker.worker_id for worker, _ in a.lost] == ["bad"]
        sink = await good.open_sink(new_transfer(), G1, manifest_of(8), deadline_s=60, wait_s=1)
        write(sink, bytes(8))
        sink.seal()
        await good.abort(sink.key.transfer_id, G1, Cancelled("enough").to_fault())  # type: ignore[attr-defined]
        await eventually(a.at_rest)


async def test_connecting_to_nobody_fails_at_once(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        worker = worker_ref(a)
    async with asyncio.timeout(5):
        with pytest.raises(PartyLost, match="no relay answers"):
            await RelayClient.connect(str(tmp_path / "a.sock"), worker=worker, timeout_s=60)


async def test_connecting_to_a_relay_that_says_nothing_ends_in_time(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        worker = worker_ref(a)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        async with asyncio.timeout(5):
            with pytest.raises(DeadlineExceeded):
                await RelayClient.connect(str(tmp_path / "silent.sock"), worker=worker, timeout_s=0.1)


async def test_leaving_a_relay_that_hangs_takes_a_bounded_time(tmp_path: Path) -> None:
    """It has welcomed its client and reads nothing since, so that a goodbye stays unsent."""
    path = tmp_path / "hangs.sock"
    async with running(daemon_settings(tmp_path, "a")) as a:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            connecting = asyncio.create_task(RelayClient.connect(str(path), worker=worker_ref(a), timeout_s=5))
            relay, _ = await loop.sock_accept(listener)
            with relay:
                socket.send_fds(relay, [control.FD_BYTE], [a.daemon.pool_fd])
                await loop.sock_sendall(relay, control.encode(a.daemon.welcome))
                client = await connecting
                fault = Cancelled("x" * 900).to_fault()
                for _ in range(2000):
                    await client.abort(new_transfer(), G1, fault)
                async with asyncio.timeout(10):
                    await client.close()
                assert client.lost.is_set()
