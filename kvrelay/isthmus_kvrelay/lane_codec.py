"""Between the core's lane events and effects and the control frames of `wire`: one place for every transport."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus_kvrelay import wire
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import LaneId
from isthmus_kvrelay.framing import cut
from isthmus_kvrelay.transports.port import ControlEffect


def event_of(lane: LaneId, message: wire.LaneMessage) -> ev.Event | None:
    """What the core is told of a frame; None for frames that are the transport's own (Ping, Pong).

    Raises `ProtocolViolation` for a frame that contradicts itself.
    """
    match message:
        case wire.Pull():
            return ev.PullReceived(lane, message.key, message.pull)
        case wire.EagerPull():
            return ev.PullReceived(lane, message.key, message.pull, message.offer)
        case wire.Declined():
            return ev.DeclinedReceived(lane, message.key, message.pull)
        case wire.Opened():
            facts = message.total_bytes, message.chunk_bytes, message.manifest
            return ev.OpenedReceived(lane, message.key, message.pull, *facts)
        case wire.Credit():
            return ev.CreditReceived(lane, message.key, message.pull, message.grants())
        case wire.Done():
            return ev.DoneReceived(lane, message.key, message.pull)
        case wire.Abort():
            return ev.AbortReceived(lane, message.key, message.pull, message.fault)
        case wire.Revoke():
            return ev.RevokeReceived(lane, message.key, message.pull, message.fault)
        case wire.Quiet():
            return ev.QuietReceived(lane, message.key, message.pull)
        case wire.Feedback():
            return ev.FeedbackReceived(lane, message.itl_s, message.target_s)
        case wire.Ping() | wire.Pong():
            return None


def messages_of(effect: ControlEffect) -> Iterator[wire.LaneMessage]:
    """The frames that say it, in order."""
    if isinstance(effect, ev.SendFeedback):
        yield wire.Feedback(itl_s=effect.itl_s, target_s=effect.target_s)
        return
    names = wire.names_of(effect.key, effect.pull)
    match effect:
        case ev.SendPull(offer=None):
            yield wire.Pull(**names)
        case ev.SendPull(offer=ev.Offer() as offer):
            yield wire.EagerPull(effect.key, effect.pull, offer)
        case ev.SendDeclined():
            yield wire.Declined(**names)
        case ev.SendOpened():
            yield wire.Opened(
                **names, total_bytes=effect.total_bytes, chunk_bytes=effect.chunk_bytes, manifest=effect.manifest
            )
        case ev.SendCredit():
            yield from wire.Credit.batches(effect.key, effect.pull, effect.grants)
        case ev.SendDone():
            yield wire.Done(**names)
        case ev.SendAbort():
            yield wire.Abort(**names, fault=cut(effect.fault))
        case ev.SendRevoke():
            yield wire.Revoke(**names, fault=cut(effect.fault))
        case ev.SendQuiet():
            yield wire.Quiet(**names)
