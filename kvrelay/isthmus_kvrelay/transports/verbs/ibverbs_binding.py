"""The binding over the `ibverbs` wheel, which loads the system's libibverbs.so.1 (tried with 2026.10)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import ibverbs as ib

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

_LOCAL, _REMOTE = int(ib.AccessFlags.LOCAL_WRITE), int(ib.AccessFlags.REMOTE_WRITE)
_WRITE, _WRITE_WITH_IMM = int(ib.WROpcode.RDMA_WRITE), int(ib.WROpcode.RDMA_WRITE_WITH_IMM)
_SIGNALED = int(ib.SendFlags.SIGNALED)
_WITH_IMM = int(ib.WCFlags.WITH_IMM)
_PORT_ACTIVE = int(ib.PortState.ACTIVE)
_ETHERNET = 2
"""IBV_LINK_LAYER_ETHERNET"""


class IbverbsQueuePair:
    def __init__(self, context: Any, pd: Any, depths: Depths) -> None:
        self._closed = False
        self._channel = context.create_comp_channel()
        os.set_blocking(self._channel.fd, False)
        self._cq = context.create_cq(depths.send + depths.receive, channel=self._channel)
        self._cq.req_notify()
        self._qp = pd.create_qp(
            ib.QPInitAttr(send_cq=self._cq, recv_cq=self._cq, max_send_wr=depths.send, max_recv_wr=depths.receive)
        )
        self._receive = ib.RecvWR(wr_id=RECEIVE_ID)

    @property
    def number(self) -> int:
        return int(self._qp.qp_num)

    @property
    def fd(self) -> int:
        return int(self._channel.fd)

    def prepare(self) -> None:
        self._qp.to_init(PORT, _LOCAL | _REMOTE)

    def connect(self, peer: QpAddress, *, psn: int, gid_index: int, mtu: int, path: PathSettings) -> None:
        remote = ib.QPInfo(qp_num=peer.number, psn=peer.psn, lid=peer.lid, gid=peer.gid, port=PORT, mtu=peer.mtu)
        self._qp.to_rtr(remote, gid_index, mtu=mtu, hop_limit=64, min_rnr_timer=path.rnr_timer)
        self._qp.to_rts(psn, timeout=path.timeout, retry_cnt=path.retries, rnr_retry=path.rnr_retries)

    def post_receives(self, count: int) -> None:
        if count:
            self._qp.post_recv([self._receive] * count)

    def post_writes(self, writes: Sequence[Write]) -> None:
        self._qp.post_send([_send_wr(write) for write in writes])

    def completions(self) -> list[Completion]:
        if self._closed:
            return []
        try:
            self._channel.get_cq_event()
        except ib.VerbsError as error:
            if error.errno != errno.EAGAIN:
                raise
        else:
            self._cq.ack_events(1)
        self._cq.req_notify()
        found: list[Completion] = []
        while True:
            batch = self._cq.poll(MAX_POLL)
            found += [_completion(entry) for entry in batch]
            if len(batch) < MAX_POLL:
                return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._qp.close()
            self._cq.close()
            self._channel.close()


def _send_wr(write: Write) -> Any:
    return ib.SendWR(
        wr_id=write.wr_id,
        sg_list=[ib.SGE(write.local_address, write.size_bytes, lkey=write.lkey)],
        opcode=_WRITE if write.imm is None else _WRITE_WITH_IMM,
        send_flags=_SIGNALED if write.signaled else 0,
        remote_addr=write.remote_address,
        rkey=write.rkey,
        imm_data=write.imm or 0,
    )


def _completion(entry: Any) -> Completion:
    status, of_receive = Status(int(entry.status)), entry.wr_id >= RECEIVE_ID
    imm = int(entry.imm_data) if of_receive and not status and entry.wc_flags & _WITH_IMM else None
    return Completion(entry.wr_id, status, imm, of_receive)


class IbverbsRegion:
    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)

    def close(self) -> None:
        self._region.close()


class IbverbsDevice:
    def __init__(self, device: Any) -> None:
        self._name = str(device.name)
        self._context = device.open()
        self._pd = self._context.alloc_pd()

    @property
    def name(self) -> str:
        return self._name

    def port(self) -> PortFacts:
        port = self._context.query_port(PORT)
        return PortFacts(
            active=int(port.state) == _PORT_ACTIVE,
            mtu=int(port.active_mtu),
            lid=int(port.lid),
            ethernet=int(port.link_layer) == _ETHERNET,
        )

    def register(self, address: int, size_bytes: int, *, remote_write: bool) -> IbverbsRegion:
        return IbverbsRegion(self._pd.reg_mr(address, size_bytes, _LOCAL | (_REMOTE if remote_write else 0)))

    def queue_pair(self, depths: Depths, receive_into: Region, receive_address: int) -> IbverbsQueuePair:
        return IbverbsQueuePair(self._context, self._pd, depths)

    def close(self) -> None:
        self._pd.close()
        self._context.close()


class IbverbsBinding:
    name = "ibverbs"
    version = str(ib.__version__)

    def devices(self) -> list[str]:
        return [str(device.name) for device in ib.get_device_list()]

    def open(self, device: str) -> IbverbsDevice:
        found = [entry for entry in ib.get_device_list() if entry.name == device]
        if not found:
            raise FileNotFoundError(2, f"no RDMA device {device!r}")
        return IbverbsDevice(found[0])


def make() -> IbverbsBinding:
    return IbverbsBinding()
