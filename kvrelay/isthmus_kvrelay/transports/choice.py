"""The relay's one transport as the daemon sees it: TCP, RDMA verbs, or both behind one listener."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core.events import CloseLane, Dial, ExpectChunk, LaneId, RevokeFlow, SendChunk
from isthmus_kvrelay.transports.handshake import Identity, LaneKind
from isthmus_kvrelay.transports.port import ControlEffect, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.tcp import Adopt, TcpSettings, TcpTransport
from isthmus_kvrelay.transports.verbs.binding import Binding, load_binding
from isthmus_kvrelay.transports.verbs.messages import MAX_RAILS
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings, VerbsTransport
from isthmus_shared.errors import ConfigInvalid, IsthmusError


class TransportKind(StrEnum):
    AUTO = "auto"
    """Verbs where both ends have devices, else TCP."""
    TCP = "tcp"
    VERBS = "verbs"
    """Verbs or nothing."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    tcp: TcpSettings
    """Its listener is every lane's door, whatever carries the chunks."""
    kind: TransportKind = TransportKind.TCP
    verbs: VerbsSettings = field(default_factory=VerbsSettings)
    """No devices: all that there are."""
    load: Callable[[], Binding] = load_binding
    """Where the verbs library comes from; not called for `tcp`."""


def make_transport(
    settings: TransportSettings, *, me: Identity, pool: SharedPool, emit: Emit, log: FilteringBoundLogger
) -> TcpTransport | MixedTransport:
    """`ConfigInvalid` when lanes over verbs are asked for and cannot be had; `auto` goes on with TCP, and says so."""
    if settings.kind is TransportKind.TCP:
        return TcpTransport(settings.tcp, me=me, pool=pool, emit=emit, log=log)
    only_verbs = settings.kind is TransportKind.VERBS
    must = only_verbs or bool(settings.verbs.devices)
    try:
        if settings.tcp.tls is not None:
            raise ConfigInvalid(
                "TLS is set, and what adapters write over RDMA cannot be encrypted by the relay",
                todo="unset ISTHMUS_RELAY_TLS_*, or set ISTHMUS_RELAY_TRANSPORT=tcp",
                param="transport",
            )
        binding = settings.load()
        verbs = dataclasses.replace(settings.verbs, devices=settings.verbs.devices or _all_devices(binding))
    except ConfigInvalid as error:
        if must:
            raise
        log.info("relay.without_verbs", why=error.text)
        return TcpTransport(settings.tcp, me=me, pool=pool, emit=emit, log=log)
    log.info("relay.verbs", binding=binding.name, version=binding.version, devices=list(verbs.devices))
    return MixedTransport(
        settings.tcp, verbs, binding, only_verbs=only_verbs, must=must, me=me, pool=pool, emit=emit, log=log
    )


def _all_devices(binding: Binding) -> tuple[str, ...]:
    try:
        names = sorted(binding.devices())
    except OSError as error:
        raise ConfigInvalid("the kernel has no RDMA", why=str(error), todo="ISTHMUS_RELAY_TRANSPORT=tcp") from error
    if not names:
        raise ConfigInvalid("there is no RDMA device", todo="ISTHMUS_RELAY_TRANSPORT=tcp")
    return tuple(names[:MAX_RAILS])


class MixedTransport:
    """See `transports.port.Transport`. Lanes over verbs have even numbers, lanes over TCP odd ones."""

    def __init__(
        self,
        tcp: TcpSettings,
        verbs: VerbsSettings,
        binding: Binding,
        *,
        only_verbs: bool,
        must: bool,
        me: Identity,
        pool: SharedPool,
        emit: Emit,
        log: FilteringBoundLogger,
    ) -> None:
        """`must`: a device that cannot be opened is fatal; otherwise TCP carries all lanes then."""
        self._must, self._log = must, log
        self._has_verbs = False
        self._verbs = VerbsTransport(
            verbs,
            binding,
            me=me,
            pool=pool,
            emit=emit,
            log=log,
            lane_numbers=count(2, 2),
            dial_failed=None if only_verbs else self._dial_tcp,
        )
        adopt: dict[LaneKind, Adopt | None] = {"verbs": self._verbs.adopt}
        if not only_verbs:
            adopt["tcp"] = None
        self._tcp = TcpTransport(tcp, me=me, pool=pool, emit=emit, log=log, lane_numbers=count(1, 2), adopt=adopt)

    @property
    def uncredited_chunks(self) -> int:
        return self._tcp.uncredited_chunks + self._verbs.uncredited_chunks

    @property
    def loading(self) -> Loading:
        return self._tcp.loading

    @property
    def rail_failures(self) -> dict[str, int]:
        return self._verbs.rail_failures

    async def start(self) -> str:
        try:
            await self._verbs.start()
            self._has_verbs = True
        except ConfigInvalid as error:
            if self._must:
                raise
            self._log.warning("relay.without_verbs", why=error.text)
        try:
            return await self._tcp.start()
        except BaseException:
            await self._verbs.close()
            raise

    async def watch(self) -> None:
        """The verbs side's tasks end only with it: TCP's must be watched beside it."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._verbs.watch())
            both.create_task(self._tcp.watch())

    async def close(self) -> None:
        await self._tcp.close()
        await self._verbs.close()

    def _of(self, lane: LaneId) -> TcpTransport | VerbsTransport:
        return self._tcp if lane % 2 else self._verbs

    def dial(self, effect: Dial) -> None:
        if self._has_verbs:
            self._verbs.dial(effect)
        else:
            self._tcp.dial(effect)

    def _dial_tcp(self, effect: Dial, error: IsthmusError) -> None:
        """The peer has no verbs, or no rail to it works."""
        self._tcp.dial(effect)

    def send(self, effect: ControlEffect) -> None:
        self._of(effect.lane).send(effect)

    def send_chunk(self, effect: SendChunk) -> None:
        self._of(effect.lane).send_chunk(effect)

    def expect(self, effect: ExpectChunk) -> None:
        self._of(effect.lane).expect(effect)

    def revoke(self, effect: RevokeFlow) -> None:
        self._of(effect.lane).revoke(effect)

    def close_lane(self, effect: CloseLane) -> None:
        self._of(effect.lane).close_lane(effect)
