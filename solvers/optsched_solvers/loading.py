"""Import modules and have their kernels compiled, without missing a limit for it."""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from optsched.limits import available_cores

if TYPE_CHECKING:
    from optsched.monitor import Monitor

_WATCH = 0.01  # seconds between two looks at the limits

_loaders: dict[tuple[str, ...], _Loader] = {}
_lock = threading.Lock()


class _Loader:
    """Modules on their way, in a thread that nobody must wait for."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.done = threading.Event()
        self.failure: BaseException | None = None
        threading.Thread(target=self._load, name=f"loading {modules[0]}", daemon=True).start()

    def _load(self) -> None:
        try:
            for module in self.modules:
                import_module(module.partition(":")[0])
            if "optsched.compiled" in sys.modules:  # else nothing of it is compiled
                self._compile()
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()

    def _compile(self) -> None:
        from optsched.compiled import entries
        from optsched.compiling import compile_all

        wanted = [one for module in self.modules for one in entries(module)]
        missing = sum(not one.ready for one in wanted)
        if missing:
            logging.getLogger("optsched").warning(
                "compiling %d kernels for %s, once on this machine (see `optsched warmup`)",
                missing, ", ".join(name.rpartition(".")[2] for name in self.modules),
            )  # fmt: skip
            compile_all(wanted, available_cores())


def loaded(*modules: str) -> bool:
    """Whether these modules of `optsched_solvers` (or others, by full name) can be used at once."""
    return all(map(_is_loaded, map(_full_name, modules)))


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name.partition(":")[0])
    if module is None or getattr(module.__spec__, "_initializing", False):
        return False
    if "optsched.compiled" not in sys.modules:
        return True
    from optsched.compiled import entries

    return all(one.ready for one in entries(name))


def load(monitor: Monitor, *modules: str) -> bool:
    """Import modules of `optsched_solvers` (or others, by full name); False if told to stop first.

    Their kernels, or of ``module:a,b`` those named, are taken from disk; on a new machine they are
    compiled first, for seconds, by processes that finish even if this one does not wait for them.
    Where the user gave no limit the clock stands still meanwhile.
    """
    names = tuple(map(_full_name, modules))
    if loaded(*names):
        return True
    with _lock:
        loader = _loaders.get(names)
        if loader is None or loader.done.is_set():
            loader = _loaders[names] = _Loader(names)
    with monitor.waiting_for_kernels():
        while not loader.done.wait(_WATCH):
            if monitor.should_stop():
                if not monitor.proved and not monitor.interrupted:
                    monitor.missing.update(name.rpartition(".")[2] for name in modules)
                return False
    if loader.failure is not None:
        raise loader.failure
    return True


def _full_name(module: str) -> str:
    return module if "." in module else f"optsched_solvers.{module}"
