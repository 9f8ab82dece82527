"""From a configuration to an engine. An adapter's libraries are imported only when it is chosen."""

from __future__ import annotations

from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.runner_port import Runner
from isthmus_shared.errors import ConfigInvalid


def create_engine(config: EngineConfig) -> BatchingEngine:
    """Not started. Raises `ConfigInvalid` when the adapter's libraries are missing or its settings cannot hold."""
    return BatchingEngine(_runner(config), config)


def _runner(config: EngineConfig) -> Runner:
    try:
        match config.kind:
            case EngineKind.REFERENCE:
                from isthmus_shared.engines.reference.runner import ReferenceRunner

                return ReferenceRunner(config)
            case EngineKind.SIM:
                from isthmus_shared.engines.sim import SimRunner

                return SimRunner(config)
    except ImportError as error:
        extra = "torch" if config.kind is EngineKind.REFERENCE else "relay"
        raise ConfigInvalid(
            f"engine {config.kind} needs a library that is not installed",
            why=str(error),
            todo=f"install isthmus[{extra}]",
            param="kind",
        ) from error
