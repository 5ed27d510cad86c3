"""Import modules and compile their kernels, without missing a limit for it."""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from optsched.solving.limits import available_cores

if TYPE_CHECKING:
    from optsched.kernels.compile import Entry
    from optsched.solving.monitor import Monitor

_TOP = ("optsched", "optsched_solvers", "deap", "ortools")

_POLL = 0.01  # seconds between two checks of the limits

_loaders: list[_Loader] = []
_lock = threading.Lock()


class _Loader:
    """Modules being loaded, in a thread that is never joined."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.compiles: list[Entry] = []
        self._is_logged = False
        self.done = threading.Event()
        self.failure: BaseException | None = None
        threading.Thread(target=self._load, name=f"loading {modules[0]}", daemon=True).start()

    def _load(self) -> None:
        try:
            for module in self.modules:
                import_module(module.partition(":")[0])
            if "optsched.kernels.compile" in sys.modules:  # else nothing of it is compiled
                from optsched.kernels.background import compile_all
                from optsched.kernels.compile import entries

                found = [entry for module in self.modules for entry in entries(module)]
                self.compiles = [entry for entry in found if not entry.ready]
                compile_all(self.compiles, available_cores())
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()

    def log(self) -> None:
        """Log once what is being compiled."""
        if self.compiles and not self._is_logged:
            self._is_logged = True
            modules = dict.fromkeys(x.__module__.rpartition(".")[2] for x in self.compiles)
            logging.getLogger("optsched").warning(
                "compiling %d kernels (%s), some seconds once on this machine; `optsched warmup` "
                "does it for all", len(self.compiles), ", ".join(modules),
            )  # fmt: skip


def loaded(*modules: str) -> bool:
    """Whether these modules of `optsched_solvers` (or others, by full name) can be used at once."""
    return all(map(_is_loaded, map(_full_name, modules)))


def load(monitor: Monitor, *modules: str) -> bool:
    """Import modules of `optsched_solvers` (or others, by full name); False if stopped before.

    Their kernels, or of ``module:a,b`` those named, are taken from disk; on a new machine they are
    compiled first, for seconds, by processes that finish even if this one ends before.
    Where the user gave no limit the clock stands still meanwhile.
    """
    if loaded(*modules):
        return True
    loader = _loader(modules)
    with monitor.clock.pause():
        while not (in_time := loader.done.wait(_POLL) or loaded(*modules)):
            loader.log()
            if monitor.should_stop():
                break
    if loader.failure is not None:
        raise loader.failure
    # also if they came at the last moment: whatever waited for them could not run
    if loader.compiles and monitor.should_stop() and not (monitor.proved or monitor.interrupted):
        monitor.missing.update(name.rpartition(".")[2] for name in modules)
    return in_time


def load_behind(*modules: str) -> None:
    """Begin to load modules that will be needed, in this order, and return at once."""
    if not loaded(*modules):
        _loader(modules)


def _loader(modules: tuple[str, ...]) -> _Loader:
    """A loader of these modules, among others: one at work, or a new one."""
    names = tuple(map(_full_name, modules))
    with _lock:
        _loaders[:] = [loader for loader in _loaders if not loader.done.is_set()]
        for loader in _loaders:
            if set(names) <= set(loader.modules):
                return loader
        _loaders.append(_Loader(names))
        return _loaders[-1]


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name.partition(":")[0])
    if module is None or getattr(module.__spec__, "_initializing", False):
        return False
    if "optsched.kernels.compile" not in sys.modules:
        return True
    from optsched.kernels.compile import entries

    return all(entry.ready for entry in entries(name))


def _full_name(module: str) -> str:
    top = module.partition(".")[0]
    return module if top in _TOP else f"optsched_solvers.{module}"
