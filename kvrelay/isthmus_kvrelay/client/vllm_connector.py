"""The vLLM connector: KV through this node's relay. How to use it: docs/vllm.md; how it works: ADR 7.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "IsthmusConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "isthmus_kvrelay.client.vllm_connector",
      "kv_connector_extra_config": {"relay_socket": "/run/isthmus/relay.sock"}}'

Only this module imports vLLM. It is a shell: the scheduler's half around `vllm.scheduling`, a worker's around
`vllm.saving` and `vllm.loading`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.request import RequestStatus

from isthmus_kvrelay.client.vllm.backends import check_parallel, form_of, untested
from isthmus_kvrelay.client.vllm.cache import RankCache
from isthmus_kvrelay.client.vllm.jobs import StepJobs
from isthmus_kvrelay.client.vllm.loading import Loader
from isthmus_kvrelay.client.vllm.metrics import ConnectorMetrics, ConnectorStats
from isthmus_kvrelay.client.vllm.model_layers import group_tables, kv_shape, read_layers
from isthmus_kvrelay.client.vllm.params import parse_params
from isthmus_kvrelay.client.vllm.rank import Rank
from isthmus_kvrelay.client.vllm.relay_thread import RelayPort, RelayThread
from isthmus_kvrelay.client.vllm.saving import Saver
from isthmus_kvrelay.client.vllm.scheduling import Scheduled, Scheduling, SchedulingSettings
from isthmus_kvrelay.client.vllm.settings import ConnectorSettings
from isthmus_kvrelay.client.vllm.stats import TransferStats, empty_report
from isthmus_shared.engines.reference.fingerprint import model_fingerprint
from isthmus_shared.errors import InvalidRequest
from isthmus_shared.ids import NodeId, WorkerId, new_id, new_incarnation
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import WorkerRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.isthmus")


@dataclass
class IsthmusMetadata(KVConnectorMetadata):
    jobs: StepJobs = field(default_factory=StepJobs)


class IsthmusConnector(KVConnectorBase_V1, SupportsHMA):
    """One half of it, by `role`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = ConnectorSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        check_parallel(vllm_config.parallel_config)
        self._scheduler = _SchedulerHalf(vllm_config, kv_cache_config, settings) if _schedules(role) else None
        self._worker = None if _schedules(role) else _WorkerHalf(vllm_config, kv_cache_config, settings)

    # --- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._half.pool = gpu_block_pool

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def on_new_request(self, request: Request) -> None:
        self._half.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self._half
        with half.stats.hook():
            half.begin(request)
            tokens = half.core.matched(request.request_id, num_computed_tokens)
            return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        half = self._half
        with half.stats.hook():
            if num_external_tokens > 0:
                tables = tuple(tuple(group) for group in blocks.get_block_ids())
                half.core.allocated(request.request_id, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        half = self._half
        with half.stats.hook():
            metadata = IsthmusMetadata(half.step(scheduler_output))
        half.stats.step_over(busy=half.core.busy)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        half = self._half
        with half.stats.hook():
            for request_id in connector_output.finished_sending or ():
                half.sent(request_id)
            for request_id in connector_output.finished_recving or ():
                half.core.received(request_id)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self._half
        with half.stats.hook():
            return half.finished(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        rank = self._rank
        with rank.stats.hook():
            rank.saver.let_go(_jobs(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        rank, jobs = self._rank, _jobs(connector_metadata)
        with rank.stats.hook():
            if not jobs.empty:
                rank.saver.begin_step(jobs)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        rank, jobs = self._rank, _jobs(self._get_connector_metadata())
        with rank.stats.hook():
            if not jobs.empty:
                rank.loader.begin_step(jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are asynchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        rank = self._rank
        if rank.saver.active:
            with rank.stats.hook():
                rank.saver.layer_done(layer_name)

    def wait_for_save(self) -> None:
        rank = self._rank
        with rank.stats.hook():
            rank.saver.step_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        rank = self._rank
        busy = rank.saver.in_flight > 0 or rank.loader.in_flight > 0
        with rank.stats.hook():
            received, failed = rank.loader.take()
            sent = rank.saver.take_sent(finished_req_ids)
        rank.stats.step_over(busy=busy or bool(received))
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        if half is not None:
            half.stop()

    # --- both

    @property
    def kv_shape(self) -> KvShape:
        """What transfers of this model's prompts hold; known to the scheduler's half."""
        return self._half.shape

    def use_flows(self, flows: RelayPort) -> None:
        """With `worker_flows`: who has opened them. For the worker's half, before the first request."""
        assert self._rank.relay is not None, "vLLM registers its caches before it uses them"
        self._rank.relay.use(flows)

    @property
    def stats(self) -> TransferStats:
        """What this half has counted."""
        return self._half.stats if self._worker is None else self._worker.stats

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        report = self.stats.take()
        return None if report is None else ConnectorStats(data=dict(report))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=dict(empty_report()) if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _half(self) -> _SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's hook in a worker's half"
        return self._scheduler

    @property
    def _rank(self) -> _WorkerHalf:
        assert self._worker is not None, "a worker's hook in the scheduler's half"
        return self._worker


class _SchedulerHalf:
    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorSettings) -> None:
        if (warning := untested(vllm.__version__)) is not None:
            logger.warning(warning)
        self.stats = TransferStats(scheduler=True)
        self.pool: BlockPool | None = None
        self._pins: dict[str, list[int]] = {}
        self._requests: dict[str, Request] = {}
        tp_size = config.parallel_config.tensor_parallel_size
        self.shape = kv_shape(
            read_layers(cache.kv_cache_groups),
            fingerprint=settings.model_fingerprint or model_fingerprint(_model_folder(config)),
            tp_size=tp_size,
            kv_heads_total=config.model_config.get_total_num_kv_heads(),
        )
        self.core = Scheduling(
            SchedulingSettings(
                shape=self.shape,
                groups=group_tables(cache.kv_cache_groups),
                tp_size=tp_size,
                peer_tp_size=settings.peer_tp_size or tp_size,
                deadline_s=settings.deadline_s,
            )
        )
        self._relay = _relay_thread(config, settings, "scheduler")

    def begin(self, request: Request) -> None:
        """Reads what the request asks of the connector, once."""
        if not request.kv_transfer_params or request.request_id in self._requests:
            return
        self._requests[request.request_id] = request
        try:
            params = parse_params(request.kv_transfer_params)
        except InvalidRequest as error:
            logger.warning("%s: %s; its KV is not transferred", request.request_id, error.text)
            return
        if params is not None:
            transfer_id = new_id("xfer")
            self.core.begin(request.request_id, request.num_prompt_tokens, params, transfer_id=transfer_id)

    def step(self, output: SchedulerOutput) -> StepJobs:
        scheduled = {}
        if self._requests:
            cached = output.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed.update((one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs)
            scheduled = {
                request_id: Scheduled(computed[request_id], tokens)
                for request_id, tokens in output.num_scheduled_tokens.items()
                if request_id in self._requests
            }
        blocks = output.kv_connector_block_state
        plan = self.core.step(
            scheduled,
            lambda request_id: tuple(tuple(group) for group in blocks.get_block_ids(request_id)),
            self._preempted(output),
        )
        for request_id, ids in plan.pins.items():
            if self.pool is not None:
                self.pool.touch([self.pool.blocks[block] for block in ids])
                self._pins.setdefault(request_id, []).extend(ids)
        return plan.jobs

    def _preempted(self, output: SchedulerOutput) -> Iterable[str]:
        named = set(output.preempted_req_ids or ()) | set(output.scheduled_cached_reqs.resumed_req_ids)
        return [
            request_id
            for request_id in self.core.saving
            if request_id in named or self._requests[request_id].status == RequestStatus.PREEMPTED
        ]

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._requests.pop(request.request_id, None) is None:
            return False, None
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        done = self.core.finished(request.request_id, aborted=aborted, relay=self._relay.relay)
        return done.held, done.params

    def sent(self, request_id: str) -> None:
        self.core.sent(request_id)
        ids = self._pins.pop(request_id, None)
        if ids and self.pool is not None:
            self.pool.free_blocks([self.pool.blocks[block] for block in ids])

    def stop(self) -> None:
        self._relay.stop()


class _WorkerHalf:
    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorSettings) -> None:
        self._config, self._settings = config, settings
        self._layers = read_layers(cache.kv_cache_groups)
        self.stats = TransferStats(scheduler=False)
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self.relay: RelayThread | None = None

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """The engine's caches are there: from now on KV can be transferred."""
        rank = get_tensor_model_parallel_rank()
        layers = get_layers_from_vllm_config(self._config, AttentionLayerBase)
        amx = self._config.model_config.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        backends = {spec.name: layers[spec.name].get_attn_backend().get_name() for spec in self._layers}
        cache = RankCache(self._layers, tensors, lambda name: form_of(backends[name], os.environ, amx=amx))
        self.relay = _relay_thread(self._config, self._settings, f"r{rank}")
        shared = Rank(
            rank=rank,
            tp_size=self._config.parallel_config.tensor_parallel_size,
            layers=self._layers,
            kv_heads_total=self._config.model_config.get_total_num_kv_heads(),
            relay=self.relay,
            stats=self.stats,
            log=logger.warning,
            staging_wait_s=self._settings.staging_wait_s,
            appear_s=self._settings.appear_s,
        )
        self._saver, self._loader = Saver(shared, cache), Loader(shared, cache)
        forms = sorted({f"{backend}: {form_of(backend, os.environ, amx=amx)}" for backend in backends.values()})
        logger.info(
            "KV of %d layers through %s; %s",
            len(tensors),
            self._settings.relay_socket or "the worker",
            "; ".join(forms),
        )

    @property
    def saver(self) -> Saver:
        assert self._saver is not None, "vLLM registers its caches before it uses them"
        return self._saver

    @property
    def loader(self) -> Loader:
        assert self._loader is not None, "vLLM registers its caches before it uses them"
        return self._loader

    def stop(self) -> None:
        if self._saver is not None and self._loader is not None:
            self._saver.stop()
            self._loader.stop()
        if self.relay is not None:
            self.relay.stop()


def _schedules(role: KVConnectorRole) -> bool:
    return bool(role == KVConnectorRole.SCHEDULER)


def _jobs(metadata: KVConnectorMetadata) -> StepJobs:
    assert isinstance(metadata, IsthmusMetadata)
    return metadata.jobs


def _relay_thread(config: VllmConfig, settings: ConnectorSettings, part: str) -> RelayThread:
    """Started, and connected if the relay is there within `attach_s`."""
    engine = settings.worker_id or f"vllm-{config.kv_transfer_config.engine_id[:8]}"
    worker = WorkerRef(
        worker_id=WorkerId(f"{engine}-{part}"), incarnation=new_incarnation(), node_id=NodeId(settings.node_id)
    )
    relay = RelayThread(settings.relay_socket, worker, logger.info)
    relay.start()
    if settings.relay_socket is not None and not relay.wait_attached(settings.attach_s):
        logger.warning("no relay at %s yet: until it is there, KV is not transferred", settings.relay_socket)
    return relay


def _model_folder(config: VllmConfig) -> Path:
    """Where the model's files are; a hub's name is looked up in the local cache."""
    model = config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    return Path(huggingface_hub.snapshot_download(model.model, revision=model.revision, local_files_only=True))
