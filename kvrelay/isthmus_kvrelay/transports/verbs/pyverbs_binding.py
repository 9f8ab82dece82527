"""The binding over rdma-core's own pyverbs (Debian: python3-pyverbs; tried with 44)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv6Address
from typing import Any

import pyverbs
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from isthmus_kvrelay.transports.verbs.binding import (
    MAX_POLL,
    PORT,
    RECEIVE_ID,
    Completion,
    Depths,
    PathSettings,
    PortFacts,
    QpAddress,
    Region,
    Status,
    Write,
)

# From the verbs ABI; the module that has them by name moved between releases of pyverbs.
_QPT_RC = 2
_LOCAL_WRITE, _REMOTE_WRITE = 1, 2
_RDMA_WRITE, _RDMA_WRITE_WITH_IMM = 0, 1
_SIGNALED = 2
_PORT_ACTIVE = 4
_ETHERNET = 2
_WITH_IMM = 2
_MAX_WR_ID = RECEIVE_ID


@contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    try:
        yield
    except PyverbsRDMAError as error:
        code = abs(int(error.error_code)) or errno.EIO
        raise OSError(code, f"{what}: {error}") from error
    except PyverbsError as error:
        raise OSError(errno.EIO, f"{what}: {error}") from error


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except OSError:
            continue  # the descriptor of this very listing
    return found


class PyverbsQueuePair:
    def __init__(self, context: Any, pd: Any, depths: Depths, receive: Any) -> None:
        before = _event_fds()
        with _as_os_error("completion channel"):
            self._channel = CompChannel(context)
        fd = getattr(self._channel, "fd", None)
        if fd is None:  # pyverbs 44 does not tell
            (fd,) = _event_fds() - before
        self._fd = int(fd)
        os.set_blocking(self._fd, False)  # the library holds the interpreter's lock while it waits
        self._closed = False
        cap = QPCap(max_send_wr=depths.send, max_recv_wr=depths.receive, max_send_sge=1, max_recv_sge=1)
        with _as_os_error("queue pair"):
            self._cq = CQ(context, depths.send + depths.receive, None, self._channel, 0)
            self._cq.req_notify()
            attributes = QPInitAttr(qp_type=_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
            self._qp = QP(pd, attributes)
        self._receive = receive

    @property
    def number(self) -> int:
        return int(self._qp.qp_num)

    @property
    def fd(self) -> int:
        return self._fd

    def prepare(self) -> None:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = _LOCAL_WRITE | _REMOTE_WRITE
        with _as_os_error("queue pair to INIT"):
            self._qp.to_init(attributes)

    def connect(self, peer: QpAddress, *, psn: int, gid_index: int, mtu: int, path: PathSettings) -> None:
        route = GlobalRoute(dgid=GID(IPv6Address(peer.gid).exploded), sgid_index=gid_index, hop_limit=64)
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = _LOCAL_WRITE | _REMOTE_WRITE
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route, dlid=peer.lid)
        attributes.path_mtu = mtu
        attributes.dest_qp_num, attributes.rq_psn = peer.number, peer.psn
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 1, path.rnr_timer
        with _as_os_error("queue pair to RTR"):
            self._qp.to_rtr(attributes)
        attributes.sq_psn, attributes.max_rd_atomic = psn, 1
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = path.timeout, path.retries, path.rnr_retries
        with _as_os_error("queue pair to RTS"):
            self._qp.to_rts(attributes)

    def post_receives(self, count: int) -> None:
        with _as_os_error("post receives"):
            for _ in range(count):
                self._qp.post_recv(self._receive)

    def post_writes(self, writes: Sequence[Write]) -> None:
        chain: list[Any] = []
        try:
            for write in reversed(writes):
                chain.append(_send_wr(write, chain[-1] if chain else None))
            with _as_os_error("post writes"):
                self._qp.post_send(chain[-1])
        finally:
            for request in chain:
                request.close()  # what it allocated goes only here

    def completions(self) -> list[Completion]:
        if self._closed:
            return []
        with _as_os_error("completions"):
            try:
                self._channel.get_cq_event(self._cq)
            except PyverbsRDMAError:
                pass  # no event: EAGAIN
            else:
                self._cq.ack_events(1)
            self._cq.req_notify()
            found: list[Completion] = []
            while True:
                count, batch = self._cq.poll(MAX_POLL)
                found += [_completion(entry) for entry in batch[:count]]
                if count < MAX_POLL:
                    return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with _as_os_error("close queue pair"):
                self._qp.close()
                self._cq.close()
                self._channel.close()


def _send_wr(write: Write, following: Any) -> Any:
    with_imm = write.imm is not None
    request = SendWR(
        wr_id=write.wr_id,
        opcode=_RDMA_WRITE_WITH_IMM if with_imm else _RDMA_WRITE,
        num_sge=1,
        imm_data=socket.htonl(write.imm) if write.imm is not None else 0,
        sg=[SGE(write.local_address, write.size_bytes, write.lkey)],
        send_flags=_SIGNALED if write.signaled else 0,
        next_wr=following,
    )
    request.set_wr_rdma(write.rkey, write.remote_address)
    return request


def _completion(entry: Any) -> Completion:
    status, of_receive = Status(entry.status), entry.wr_id >= _MAX_WR_ID
    imm = socket.ntohl(entry.imm_data) if of_receive and not status and entry.wc_flags & _WITH_IMM else None
    return Completion(entry.wr_id, status, imm, of_receive)


class PyverbsRegion:
    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)  # the library's own crash once it is closed

    def close(self) -> None:
        with _as_os_error("close region"):
            self._region.close()


class PyverbsDevice:
    def __init__(self, name: str) -> None:
        self._name = name
        with _as_os_error(f"open {name}"):
            self._context = Context(name=name)
            self._pd = PD(self._context)

    @property
    def name(self) -> str:
        return self._name

    def port(self) -> PortFacts:
        with _as_os_error("query port"):
            port = self._context.query_port(PORT)
        return PortFacts(
            active=port.state == _PORT_ACTIVE,
            mtu=int(port.active_mtu),
            lid=int(port.lid),
            ethernet=port.link_layer == _ETHERNET,
        )

    def register(self, address: int, size_bytes: int, *, remote_write: bool) -> PyverbsRegion:
        access = _LOCAL_WRITE | (_REMOTE_WRITE if remote_write else 0)
        with _as_os_error(f"register {size_bytes} bytes"):
            return PyverbsRegion(MR(self._pd, size_bytes, access, address=address))

    def queue_pair(self, depths: Depths, receive_into: Region, receive_address: int) -> PyverbsQueuePair:
        receive = RecvWR(wr_id=RECEIVE_ID, num_sge=1, sg=[SGE(receive_address, 0, receive_into.lkey)])
        return PyverbsQueuePair(self._context, self._pd, depths, receive)

    def close(self) -> None:
        with _as_os_error("close device"):
            self._pd.close()
            self._context.close()


class PyverbsBinding:
    name = "pyverbs"
    version = str(getattr(pyverbs, "__version__", "of rdma-core"))

    def devices(self) -> list[str]:
        with _as_os_error("list devices"):
            return [device.name.decode() for device in get_device_list()]

    def open(self, device: str) -> PyverbsDevice:
        return PyverbsDevice(device)


def make() -> PyverbsBinding:
    return PyverbsBinding()
