"""From a configuration to an engine. An adapter's libraries are imported only when it is chosen."""

from __future__ import annotations

from importlib.util import find_spec

from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.port import Engine
from isthmus_shared.engines.runner_port import Runner
from isthmus_shared.errors import ConfigInvalid

_EXTRAS = {EngineKind.REFERENCE: "install isthmus[torch]", EngineKind.SIM: "install isthmus[relay]"}
_VLLM = "install vLLM beside Isthmus (docs/vllm.md)"


def create_engine(config: EngineConfig) -> Engine:
    """Not started. Raises `ConfigInvalid` when the adapter's libraries are missing or its settings cannot hold."""
    if config.kind is EngineKind.VLLM:
        return _vllm(config)
    return create_batching_engine(config)


def create_batching_engine(config: EngineConfig) -> BatchingEngine:
    """One of the engines that Isthmus schedules itself."""
    try:
        return BatchingEngine(_runner(config), config)
    except ImportError as error:
        raise _missing(config.kind, _EXTRAS[config.kind], error) from error


def _runner(config: EngineConfig) -> Runner:
    if config.kind is EngineKind.REFERENCE:
        from isthmus_shared.engines.reference.runner import ReferenceRunner

        return ReferenceRunner(config)
    assert config.kind is EngineKind.SIM, config.kind
    from isthmus_shared.engines.sim import SimRunner

    return SimRunner(config)


def _vllm(config: EngineConfig) -> Engine:
    if find_spec("vllm") is None:
        raise _missing(config.kind, _VLLM, "no module named 'vllm'")
    from isthmus_shared.engines.vllm.arguments import parse
    from isthmus_shared.engines.vllm.engine import VllmEngine

    parse(config.vllm_args)
    return VllmEngine(config)


def _missing(kind: EngineKind, todo: str, why: object) -> ConfigInvalid:
    return ConfigInvalid(f"engine {kind} needs a library that is not installed", why=str(why), todo=todo, param="kind")
