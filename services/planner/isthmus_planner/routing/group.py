"""Workers of one model that may exchange KV: same weights, same KV form."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_planner.routing.columns import DecodeColumns, PrefillColumns
from isthmus_planner.routing.kv_size import KvSize, kv_size
from isthmus_planner.routing.policy import Weights
from isthmus_planner.routing.rails import Rails
from isthmus_planner.routing.seat import Seat
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat

GroupKey = tuple[str, str, str]
"""(model, fingerprint, KV form)"""
Standing = tuple[object, ...]


def key_of(beat: WorkerHeartbeat) -> GroupKey:
    return beat.model, beat.model_fingerprint, beat.kv_form


def standing_of(beat: WorkerHeartbeat) -> Standing:
    """Which columns a worker is in, and what of it never changes within them: another one means new columns."""
    load = beat.load
    return (
        key_of(beat),
        beat.roles,
        beat.state,
        beat.relay is not None,
        beat.node_id,
        beat.max_model_len_tokens,
        beat.kv_block_tokens,
        load.kv_blocks_total,
    )


@dataclass(slots=True)
class Group:
    key: GroupKey
    weights: Weights
    seats: dict[Incarnation, Seat] = field(default_factory=dict)
    """All of it, whatever their state."""
    size: KvSize | None = field(init=False)
    """None: the form cannot be read, and crossings are told in tokens."""
    stale: bool = True
    """Somebody came, went or changed its standing since the columns were made."""
    prefill: PrefillColumns = field(init=False)
    """Ready, with the prefill role and a relay."""
    decode: DecodeColumns = field(init=False)
    """Ready, with the decode role."""
    alone: PrefillColumns = field(init=False)
    """The same workers as `decode`, in the same order: what it costs to prefill there as well."""

    def __post_init__(self) -> None:
        self.size = kv_size(self.key[2])
        self.prefill = self.alone = PrefillColumns((), self.weights)
        self.decode = DecodeColumns((), self.weights)

    def crossing_bytes(self, tokens: int) -> float:
        return float(tokens) if self.size is None else self.size.of(tokens)

    def put(self, seat: Seat) -> None:
        """In place of the same worker's last one, which has the same standing."""
        life = seat.beat.incarnation
        self.seats[life] = seat
        if self.stale:
            return
        at = self.prefill.index.get(life)
        if at is not None:
            self.prefill.put(at, seat)
        at = self.decode.index.get(life)
        if at is not None:
            self.decode.put(at, seat)
            self.alone.put(at, seat)

    def refresh(self, rails: Rails) -> None:
        """Columns anew if they are stale: rare, and O(workers)."""
        if not self.stale:
            return
        ordered = sorted(self.seats.values(), key=lambda seat: seat.beat.worker_id)
        ready = [seat for seat in ordered if seat.beat.state is ProcessState.READY]
        prefillers = [seat for seat in ready if Role.PREFILL in seat.beat.roles and seat.beat.relay is not None]
        decoders = [seat for seat in ready if Role.DECODE in seat.beat.roles]
        self.prefill = PrefillColumns(prefillers, self.weights)
        self.decode = DecodeColumns(decoders, self.weights)
        self.alone = PrefillColumns(decoders, self.weights)
        self.stale = False
        for node in {*self.prefill.nodes, *self.decode.nodes}:
            self.set_rail(node, rails)

    def set_rail(self, node: NodeId, rails: Rails) -> None:
        """That node's relay has told what it does."""
        if self.stale:
            return
        rail = rails.rail(node, self.size)
        for i in self.prefill.nodes.get(node, ()):
            self.prefill.out[i], self.prefill.staging[i] = rail.out_s_per_byte, rail.staging_free_bytes
        for j in self.decode.nodes.get(node, ()):
            self.decode.inn[j] = rail.in_s_per_byte
