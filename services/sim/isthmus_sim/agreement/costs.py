"""A node of the planner's simulator as the cost of a sim engine's steps: the same tables, the same mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus_planner.sim.hardware import Node
from isthmus_shared.engines.sequence import Batch


@dataclass(frozen=True)
class NodeCosts:
    """`arrived_bytes`: of KV since the last time it was asked, for the mechanism `descriptor_posting`."""

    node: Node
    arrived_bytes: Callable[[], float] = lambda: 0.0

    def batch_s(self, batch: Batch) -> float:
        prompts = [(len(work.tokens), work.start) for work in batch.works if work.prefill]
        decoding = [work for work in batch.works if work.decodes]
        took_s = self._prefill_s(prompts) if prompts else 0.0
        if decoding:
            took_s += self._decode_s(len(decoding), sum(work.start for work in decoding))
            took_s += self._stall_s([work.sequence.prompt_tokens for work in decoding if work.load])
            took_s += self._receiving_s(self.arrived_bytes())
        return took_s

    def _prefill_s(self, prompts: list[tuple[int, int]]) -> float:
        table = self.node.prefill
        assert table is not None, f"node {self.node.name} has no prefill law"
        new = sum(tokens for tokens, _ in prompts)
        passes = -(-new // self.node.pass_tokens)
        work_s = table.token_s * new
        work_s += table.pair_s * sum(tokens * (before + 0.5 * tokens) for tokens, before in prompts)
        return table.base_s * passes + max(table.floor_s * passes, work_s) + table.extra_token_s * new

    def _decode_s(self, sequences: int, kv_tokens: int) -> float:
        table, resident = self.node.decode, self.node.resident_kv
        assert table is not None, f"node {self.node.name} has no decode law"
        took_s = table.step_s(sequences, kv_tokens)
        if resident is not None:
            took_s += resident.s_per_token * max(0.0, kv_tokens - resident.above_tokens)
        return took_s

    def _stall_s(self, joining: list[int]) -> float:
        stall = self.node.transfer_stall
        if stall is None:
            return 0.0
        return sum(stall.stall_s + stall.stall_s_per_token * tokens for tokens in joining)

    def _receiving_s(self, arrived_bytes: float) -> float:
        """Host work for what has come since the last step."""
        posting = self.node.descriptor_posting
        return 0.0 if posting is None else arrived_bytes * posting.share_per_byte_per_s
