"""A service as a process: event loop, logging, signals, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import uvloop
from structlog.typing import FilteringBoundLogger

from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import ConfigInvalid, IsthmusError
from isthmus_shared.ids import new_incarnation
from isthmus_shared.log import configure_logging
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.service import ServiceRuntime

__all__ = ["EXIT_CLEAN", "EXIT_CONFIG", "EXIT_FAILURE", "ServiceRuntime", "run_from_environ", "run_service"]

C = TypeVar("C", bound=ServiceConfig)

EXIT_CLEAN, EXIT_FAILURE, EXIT_CONFIG = 0, 1, 2


def run_from_environ(
    name: str,
    config_type: type[C],
    main: Callable[[ServiceRuntime[C]], Awaitable[None]],
    environ: Mapping[str, str],
    *,
    instance: Callable[[C], str] | None = None,
) -> int:
    """`run_service` with the settings of the environment; what is wrong with them goes to stderr, status 2."""
    try:
        config = config_type.load(environ)
        config.check()
    except ConfigInvalid as error:
        sys.stderr.write(f"{name}: {error.text}\n")
        return EXIT_CONFIG
    return run_service(name, config, main, instance=None if instance is None else instance(config))


def run_service(
    name: str, config: C, main: Callable[[ServiceRuntime[C]], Awaitable[None]], *, instance: str | None = None
) -> int:
    """Run `main` under uvloop until it returns. SIGTERM or SIGINT sets `stopping` and the state DRAINING; what has
    not ended `shutdown_grace_s` later, or at a second signal, is cancelled.

    Returns the exit status: 0 ended by itself or in time, 2 a setting was at fault, 1 anything else (logged).
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(name, config, main, instance))


async def _run(name: str, config: C, main: Callable[[ServiceRuntime[C]], Awaitable[None]], instance: str | None) -> int:
    incarnation = new_incarnation()
    runtime = ServiceRuntime(name, config, instance=instance, incarnation=incarnation)
    log = configure_logging(
        level=config.log_level,
        format=config.log_format,
        service=name,
        instance=runtime.instance,
        incarnation=incarnation,
    )
    hurry = asyncio.Event()
    whole, entered = asyncio.current_task(), False
    assert whole is not None

    def on_signal() -> None:
        if not entered:
            whole.cancel()  # it waits for the bus, say; nothing has begun that would have to end well
        if runtime.stopping.is_set():
            hurry.set()
        runtime.stopping.set()
        runtime.set_state(ProcessState.DRAINING)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    log.info("service.starting", config=config.masked())
    try:
        async with runtime:
            entered = True
            in_time = await _until_ended(runtime, main, hurry)
    except asyncio.CancelledError:
        if not runtime.stopping.is_set():
            raise
        in_time = True
    except BaseExceptionGroup as group:
        return _failed(log, list(_leaves(group)))
    except (IsthmusError, OSError) as error:
        return _failed(log, [error])
    log.info("service.ended", in_time=in_time)
    return EXIT_CLEAN if in_time else EXIT_FAILURE


async def _until_ended(
    runtime: ServiceRuntime[C], main: Callable[[ServiceRuntime[C]], Awaitable[None]], hurry: asyncio.Event
) -> bool:
    """Whether `main` ended by itself; its exceptions come in a group."""
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_call(main, runtime), name="main")
        stop = tasks.create_task(_wait(runtime.stopping), name="stopping")
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            stop.cancel()
            return True
        runtime.log.info("service.stopping", grace_s=runtime.config.shutdown_grace_s)
        now = tasks.create_task(_wait(hurry), name="hurry")
        await asyncio.wait({work, now}, timeout=runtime.config.shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        in_time = work.done()
        if not in_time:
            runtime.log.warning("service.cancelled_at_shutdown")
            work.cancel()
        return in_time


async def _call(main: Callable[[ServiceRuntime[C]], Awaitable[None]], runtime: ServiceRuntime[C]) -> None:
    await main(runtime)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _failed(log: FilteringBoundLogger, errors: list[Any]) -> int:
    for error in errors:
        if isinstance(error, IsthmusError):
            log.error("service.failed", code=error.code, why=error.text)
        else:
            log.error("service.failed", exc_info=error)
    return EXIT_CONFIG if all(isinstance(error, ConfigInvalid) for error in errors) else EXIT_FAILURE
