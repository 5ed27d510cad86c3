"""Import modules that may have to compile first, without missing a limit for it."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optsched.monitor import Monitor

_WATCH = 0.01  # seconds between two looks at the limits
_SLOW = 1.0  # seconds; loading what is compiled takes less

_loaders: dict[str, _Loader] = {}
_lock = threading.Lock()


class _Loader:
    """One import under way, in a thread that nobody must wait for."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.begun = time.perf_counter()
        self.done = threading.Event()
        self.failure: BaseException | None = None
        threading.Thread(target=self._load, name=f"loading {module}", daemon=True).start()

    def _load(self) -> None:
        try:
            importlib.import_module(self.module)
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()


def loaded(*modules: str) -> bool:
    """Whether these modules of `optsched_solvers` (or others, by full name) can be used at once."""
    found = [
        sys.modules.get(name if "." in name else f"optsched_solvers.{name}") for name in modules
    ]
    return all(
        module is not None and not getattr(module.__spec__, "_initializing", False)
        for module in found
    )


def load(monitor: Monitor, *modules: str) -> bool:
    """Import modules of `optsched_solvers` (or others, by full name); False if told to stop first.

    The first import on a machine compiles kernels for seconds. It goes on in the background, so
    that a later call finds more of it done; ``optsched warmup`` does it beforehand.
    """
    for name in modules:
        module = name if "." in name else f"optsched_solvers.{name}"
        with _lock:
            loader = _loaders.get(module)
            if loader is None or (loader.failure is not None and loader.done.is_set()):
                loader = _loaders[module] = _Loader(module)
        while not loader.done.wait(_WATCH):
            if not monitor.should_stop():
                continue
            if monitor.remaining <= 0 and time.perf_counter() - loader.begun > _SLOW:
                logging.getLogger("optsched").warning(
                    "the time was over before %s was loaded (a moment in each process) or compiled "
                    "(once on a machine, see `optsched warmup`)", name,
                )  # fmt: skip
            return False
        if loader.failure is not None:
            raise loader.failure
    return True
