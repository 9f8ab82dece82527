"""Which flows a transfer has, and which of them concern one tensor-parallel rank. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus_kvrelay.client.vllm.jobs import FlowName, Origin
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId
from isthmus_shared.kv.canonical import CanonicalIndex
from isthmus_shared.kv.reshard import Heads, heads_of, plan_flows
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import KvTicket, RelayRef


@dataclass(frozen=True, slots=True)
class RankFlow:
    """One flow as one rank sees it. `heads` counts from the rank's own first head."""

    transfer_id: TransferId
    generation: Generation
    index: CanonicalIndex
    heads: Heads

    def ticket(self, origin: Origin, pull: int) -> KvTicket:
        source = RelayRef(
            node_id=NodeId(origin.node_id), incarnation=Incarnation(origin.incarnation), address=origin.address
        )
        return KvTicket(
            transfer_id=self.transfer_id,
            generation=self.generation,
            source=source,
            manifest=self.index.manifest,
            pull=pull,
        )


def producer_flows(name: FlowName, shape: KvShape, rank: int) -> tuple[RankFlow, ...]:
    """What `rank` of the producer sends; nothing if another rank has the same heads."""
    return _flows(name, shape, lambda producer, consumer: producer == rank, rank, name.producer_tp)


def consumer_flows(name: FlowName, shape: KvShape, rank: int) -> tuple[RankFlow, ...]:
    """What `rank` of the consumer fetches: together all of its heads."""
    return _flows(name, shape, lambda producer, consumer: consumer == rank, rank, name.consumer_tp)


def model_heads(shape: KvShape) -> int:
    """KV heads of the model; every group has as many."""
    heads = {group.kv_heads for group in shape.groups}
    assert len(heads) == 1, "every group has as many heads"
    return next(iter(heads))


def flow_id(name: FlowName, producer: int, consumer: int) -> TransferId:
    if name.producer_tp == name.consumer_tp == 1:
        return TransferId(name.transfer_id)
    return TransferId(f"{name.transfer_id}.{producer}-{consumer}")


def _flows(
    name: FlowName, shape: KvShape, mine: Callable[[int, int], bool], rank: int, tp: int
) -> tuple[RankFlow, ...]:
    total = model_heads(shape)
    first = heads_of(rank, tp, total).start
    return tuple(
        RankFlow(
            transfer_id=flow_id(name, flow.producer_rank, consumer),
            generation=Generation(name.generation),
            index=CanonicalIndex(shape.narrow_heads(flow.heads.start, flow.heads.count).manifest(name.prompt_tokens)),
            heads=Heads(flow.heads.start - first, flow.heads.count),
        )
        for flow in plan_flows(total, name.producer_tp, name.consumer_tp)
        for consumer in flow.consumer_ranks
        if mine(flow.producer_rank, consumer)
    )
