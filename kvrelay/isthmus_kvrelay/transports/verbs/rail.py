"""One attempt at one rail: a queue pair here, connected to one of the peer's, from the offer to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from secrets import randbits
from typing import Protocol

from isthmus_kvrelay.core.events import SendChunk
from isthmus_kvrelay.transports.verbs.binding import Completion, Depths, PathSettings, Status, Write
from isthmus_kvrelay.transports.verbs.faults import RailFault, fault_of, refused
from isthmus_kvrelay.transports.verbs.memory import Adapter, PoolMemory, immediate
from isthmus_kvrelay.transports.verbs.messages import RailAnswer, RailOffer, Receives, VerbsMessage
from isthmus_kvrelay.transports.verbs.window import ReceiveCount, SendWindow
from isthmus_kvrelay.wire import HEADER_BYTES, FrameType, Header, checksum, flow_digest

PROBE_ID = 2**62
"""`wr_id` of the probe; those of chunks are their numbers."""


class RailState(Enum):
    CONNECTING = auto()
    """Initialised, receives posted; the peer's address is not known yet."""
    JOINING = auto()
    """A thread connects the queue pair. Nobody but it touches that now, and the peer may not write yet."""
    CONNECTED = auto()
    """The peer may write; this end writes when it has probed."""
    PROBING = auto()
    UP = auto()
    STOPPED = auto()
    """The queue pair is destroyed; the peer has not said yet what had landed of ours."""
    ENDED = auto()


class RailHost(Protocol):
    """The lane. Called from the event loop's callbacks, never from within a call to the rail but for `rail_failed`."""

    me: bytes
    peer_digest: bytes

    def say(self, message: VerbsMessage) -> None: ...

    def rail_works(self, rail: Rail) -> None:
        """Its probe has crossed."""

    def rail_sent(self, rail: Rail, jobs: list[SendChunk]) -> None: ...

    def rail_landed(self, rail: Rail, imms: list[int]) -> None: ...

    def rail_failed(self, rail: Rail, fault: RailFault) -> None: ...


class Rail:
    def __init__(
        self,
        host: RailHost,
        adapter: Adapter,
        memory: PoolMemory,
        *,
        index: int,
        attempt: int,
        depths: Depths,
        path: PathSettings,
    ) -> None:
        """Opens the queue pair and posts its receives; `OSError` when the device refuses."""
        self._host, self.adapter, self._memory, self._path = host, adapter, memory, path
        self.index, self.attempt, self._depths = index, attempt, depths
        self.state = RailState.CONNECTING
        self._psn = randbits(24)
        self._remote: RailOffer | RailAnswer | None = None
        self.window: SendWindow | None = None
        self._receives = ReceiveCount(depths.receive)
        self.peer_landed: int | None = None
        """Of the chunks sent here, as the peer says when the rail goes down."""
        self._qp = adapter.device.queue_pair(depths, adapter.incoming, memory.incoming.address)
        self._watched = False
        try:
            self._qp.prepare()
            self._qp.post_receives(depths.receive)
        except OSError:
            self._qp.close()
            raise

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def landed(self) -> int:
        return self._receives.landed

    # --- setting up

    def _facts(self) -> dict[str, object]:
        adapter, memory = self.adapter, self._memory
        return {
            "rail": self.index,
            "attempt": self.attempt,
            "number": self._qp.number,
            "psn": self._psn,
            "gid": adapter.gid.address.packed,
            "lid": adapter.port.lid,
            "mtu": adapter.port.mtu,
            "pool_address": memory.address,
            "pool_rkey": adapter.pool.rkey,
            "heads_address": memory.incoming.address,
            "heads_rkey": adapter.incoming.rkey,
            "slots": memory.slots,
            "slot_bytes": memory.slot_bytes,
            "receives": self._receives.posted,
            "device": adapter.name,
        }

    def offer(self) -> RailOffer:
        return RailOffer.model_validate(self._facts())

    def answer(self) -> RailAnswer:
        return RailAnswer.model_validate(self._facts())

    def join(self, remote: RailOffer | RailAnswer, then: Callable[[OSError | None], None]) -> asyncio.Future[None]:
        """Connect, in a thread: the kernel finds the way to the peer meanwhile, which takes up to a second.

        `then` is called when that is over, unless the rail was stopped before. Nothing may close the device until the
        future is done.
        """
        assert self.state is RailState.CONNECTING
        self.state, self._remote = RailState.JOINING, remote
        self.window = SendWindow(self._depths, peer_receives=remote.receives)
        connect = partial(
            self._qp.connect,
            remote.address,
            psn=self._psn,
            gid_index=self.adapter.gid.index,
            mtu=min(remote.mtu, self.adapter.port.mtu),
            path=self._path,
        )
        loop = asyncio.get_running_loop()
        try:
            joining = loop.run_in_executor(None, connect)
        except RuntimeError as error:  # this host starts no more threads
            joining = loop.create_future()
            joining.set_exception(OSError(f"no thread can be had: {error}"))
        joining.add_done_callback(partial(self._joined, then))
        return joining

    def _joined(self, then: Callable[[OSError | None], None], joining: asyncio.Future[None]) -> None:
        error = joining.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if self.state is not RailState.JOINING:
            self._qp.close()  # stopped meanwhile
            return
        self.state = RailState.CONNECTED
        if error is None:
            asyncio.get_running_loop().add_reader(self._qp.fd, self.poll)
            self._watched = True
        then(error)

    def probe(self) -> None:
        """Write into a place of the peer's that nobody reads; `rail_works` or `rail_failed` follows."""
        assert self.state is RailState.CONNECTED
        assert self._remote is not None
        self.state = RailState.PROBING
        last = self._memory.slots * HEADER_BYTES
        write = Write(
            PROBE_ID,
            self._memory.outgoing.address + last,
            HEADER_BYTES,
            self.adapter.outgoing.lkey,
            self._remote.heads_address + self._remote.slots * HEADER_BYTES,
            self._remote.heads_rkey,
            signaled=True,
        )
        self._post([write])

    # --- sending

    @property
    def room(self) -> int:
        return self.window.room if self.state is RailState.UP and self.window is not None else 0

    def fits(self, job: SendChunk) -> bool:
        """Whether the slot that the peer granted is inside the pool that it announced."""
        remote = self._remote
        return remote is not None and job.into.slot < remote.slots and job.size_bytes <= remote.slot_bytes

    def send(self, jobs: list[SendChunk]) -> None:
        """At most `room` chunks, as one chain: each its header, then its payload."""
        assert self.window is not None
        assert self._remote is not None
        writes: list[Write] = []
        for posted, signaled in self.window.post(jobs):
            writes += self._writes(posted.number, posted.job, self._remote, signaled=signaled)
        self._post(writes)

    def _writes(
        self, number: int, job: SendChunk, remote: RailOffer | RailAnswer, *, signaled: bool
    ) -> tuple[Write, Write]:
        memory, out_of, into = self._memory, job.out_of.slot, job.into.slot
        flow = flow_digest(job.key)
        header = Header(
            FrameType.CHUNK,
            job.size_bytes,
            self._host.me,
            self._host.peer_digest,
            checksum(memory.pool.view(out_of, 0, job.size_bytes), flow=flow, chunk=job.chunk),
            job.chunk,
            job.into,
            job.offset_bytes,
            flow,
            job.key.generation,
        )
        memory.outgoing.put(out_of, header.encode())
        head = Write(
            number,
            memory.outgoing.address + out_of * HEADER_BYTES,
            HEADER_BYTES,
            self.adapter.outgoing.lkey,
            remote.heads_address + into * HEADER_BYTES,
            remote.heads_rkey,
        )
        payload = Write(
            number,
            memory.address + out_of * memory.slot_bytes,
            job.size_bytes,
            self.adapter.pool.lkey,
            remote.pool_address + into * remote.slot_bytes,
            remote.pool_rkey,
            imm=immediate(into, job.into.use),
            signaled=signaled,
        )
        return head, payload

    def _post(self, writes: Sequence[Write]) -> None:
        try:
            self._qp.post_writes(writes)
        except OSError as error:  # some may be on their way: only the end of the queue pair tells which
            self._host.rail_failed(self, refused(self.name, error))

    # --- completions

    def poll(self) -> None:
        """Take what has completed. Called when the channel is readable, and whenever the lane must know now."""
        if self.state in (RailState.JOINING, RailState.STOPPED, RailState.ENDED):
            return
        try:
            completions = self._qp.completions()
            fault = self._take(completions)
        except OSError as error:
            fault = refused(self.name, error)
        if fault is not None:
            self._host.rail_failed(self, fault)

    def _take(self, completions: list[Completion]) -> RailFault | None:
        fault: Status | None = None
        imms: list[int] = []
        sent: list[SendChunk] = []
        probed = False
        for done in completions:
            if done.status is not Status.SUCCESS:
                if fault in (None, Status.WR_FLUSH_ERR):  # what was flushed only follows from the first
                    fault = done.status
            elif done.of_receive:
                imms += [done.imm] if done.imm is not None else []
            elif done.wr_id == PROBE_ID:
                probed = True
            elif self.window is not None:
                sent += self.window.completed(done.wr_id)
        if imms:
            self._receives.landing(len(imms))
            self._host.rail_landed(self, imms)
        if sent:
            self._host.rail_sent(self, sent)
        if fault is not None:
            return fault_of(self.name, fault)
        if imms and self.state is not RailState.STOPPED:
            self._qp.post_receives(len(imms))
            told = self._receives.to_tell()
            if told is not None:
                self._host.say(Receives(rail=self.index, attempt=self.attempt, posted=told))
        if probed and self.state is RailState.PROBING:
            self.state = RailState.UP
            self._host.rail_works(self)
        return None

    # --- end

    def stop(self) -> None:
        """Destroy the queue pair, having counted what has landed: nothing reads or writes through it any more."""
        if self.state in (RailState.STOPPED, RailState.ENDED):
            return
        joining = self.state is RailState.JOINING
        self.state = RailState.STOPPED
        if joining:
            return  # `_joined` destroys it
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._qp.fd)
            self._watched = False
        try:
            self._take(self._qp.completions())
        except OSError:
            pass  # a device that is gone: what it has not told us counts as not landed
        self._qp.close()

    def end(self) -> tuple[list[SendChunk], list[SendChunk]]:
        """After `stop`, when the peer has counted (or never will): chunks that landed, and those that may not have."""
        assert self.state is RailState.STOPPED
        self.state = RailState.ENDED
        return self.window.peer_landed(self.peer_landed or 0) if self.window is not None else ([], [])
