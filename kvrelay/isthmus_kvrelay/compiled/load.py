"""When the compiled loops are there: loaded once, in a thread of their own, while streams still go without them."""

from __future__ import annotations

import importlib
import threading
import time
from types import ModuleType

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.compiled.symbols import addresses

_LOOPS = "isthmus_kvrelay.compiled.loops"


def load_loops() -> ModuleType:
    """Takes half a second, and up to two more when numba has nothing in its cache.

    Raises `ImportError` without numba, `RuntimeError` when it cannot or may not compile, `AttributeError` or `OSError`
    when a C function is missing.
    """
    if importlib.import_module("numba").config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")  # the loops are nothing but compiled ones
    binding = importlib.import_module("llvmlite.binding")
    errors = importlib.import_module("numba.core.errors")
    for name, address in addresses().items():
        binding.add_symbol(name, address)
    try:
        return importlib.import_module(_LOOPS)
    except errors.NumbaError as error:
        raise RuntimeError(f"numba cannot compile the loops: {error}") from error


class Loading:
    """`loops` is None until they are loaded, and for good when they cannot be."""

    def __init__(self, log: FilteringBoundLogger, *, wanted: bool = True) -> None:
        """Not `wanted`: nothing is ever loaded."""
        self.loops: ModuleType | None = None
        self._log, self._wanted = log, wanted
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """In a thread of its own. From one thread only; idempotent."""
        if self._wanted and self._thread is None:
            thread = threading.Thread(target=self._load, name="relay-compile", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this host starts no more; the next lane tries again
                self._log.warning("relay.without_compiled_loops", why=str(error))
            else:
                self._thread = thread

    @property
    def settled(self) -> bool:
        """Nothing is being loaded now."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until what was started has ended: LLVM must not be at work when the process exits."""
        if self._thread is not None:
            self._thread.join()

    def _load(self) -> None:
        started_s = time.perf_counter()
        try:
            self.loops = load_loops()
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            self._log.info("relay.without_compiled_loops", why=f"{type(error).__name__}: {error}")
        else:
            self._log.info("relay.compiled_loops", took_s=round(time.perf_counter() - started_s, 3))
