"""What a failed work request means for its rail, its lane and the lane's flows."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.transports.verbs.binding import Status
from isthmus_shared.errors import IsthmusError, PartyLost, TransferFailed

OF_THE_PATH = frozenset(
    {
        Status.RETRY_EXC_ERR,
        Status.RNR_RETRY_EXC_ERR,
        Status.WR_FLUSH_ERR,
        Status.RESP_TIMEOUT_ERR,
        Status.REM_ABORT_ERR,
        Status.FATAL_ERR,
        Status.GENERAL_ERR,
    }
)
"""The rail is at fault or the peer is gone: other rails may go on. Any other status says that one end has a bug or has
withdrawn its memory; what it would do next is unknown, so the lane is closed."""

_MEANING = {
    Status.RETRY_EXC_ERR: "the peer's adapter does not answer (retries exceeded)",
    Status.RNR_RETRY_EXC_ERR: "the peer has no receive posted (receiver not ready, retries exceeded)",
    Status.WR_FLUSH_ERR: "the connection was broken by the other end",
    Status.REM_ACCESS_ERR: "the peer's memory may not be written there (remote access error)",
    Status.REM_INV_REQ_ERR: "the peer's adapter takes no such write (remote invalid request)",
    Status.REM_OP_ERR: "the peer's adapter failed (remote operation error)",
    Status.LOC_PROT_ERR: "this relay's own memory is not registered (local protection error)",
}
_TODO = {
    Status.RETRY_EXC_ERR: "check with `isthmus doctor` that both adapters reach each other",
    Status.LOC_PROT_ERR: "report this as a bug of the relay",
}


@dataclass(frozen=True, slots=True)
class RailFault:
    """Why a rail went down."""

    device: str
    why: str
    status: Status | None = None
    """None: not a work request; a call that the device refused, or the peer's word."""

    @property
    def of_path(self) -> bool:
        return self.status is None or self.status in OF_THE_PATH

    @property
    def cause(self) -> str:
        """For counters: one for each."""
        return self.status.name.lower() if self.status is not None else "refused"

    def to_error(self) -> IsthmusError:
        """What the lane's flows are told when this fault has ended it."""
        todo = _TODO.get(self.status, "") if self.status is not None else ""
        kind: type[IsthmusError] = PartyLost
        if self.status is Status.RNR_RETRY_EXC_ERR or not self.of_path:
            kind = TransferFailed
        return kind("the lane to a peer broke", why=f"{self.device}: {self.why}", todo=todo)


def fault_of(device: str, status: Status) -> RailFault:
    return RailFault(device, f"{_MEANING.get(status, 'the work request failed')} [{status.name}]", status)


def refused(device: str, error: OSError) -> RailFault:
    return RailFault(device, error.strerror or str(error))
