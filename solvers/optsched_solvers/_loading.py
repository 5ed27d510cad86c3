"""Import modules and have their kernels compiled, without missing a limit for it."""

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

_WATCH = 0.01  # seconds between two looks at the limits

_loaders: list[_Loader] = []
_lock = threading.Lock()


class _Loader:
    """Modules on their way, in a thread that nobody must wait for."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.compiles: list[Entry] = []
        self._is_told = False
        self.done = threading.Event()
        self.failure: BaseException | None = None
        threading.Thread(target=self._load, name=f"loading {modules[0]}", daemon=True).start()

    def _load(self) -> None:
        try:
            for module in self.modules:
                import_module(module.partition(":")[0])
            if "optsched.kernels.compile" in sys.modules:  # else nothing of it is compiled
                self._compile()
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()

    def _compile(self) -> None:
        from optsched.kernels.background import compile_all
        from optsched.kernels.compile import entries

        wanted = [one for module in self.modules for one in entries(module)]
        self.compiles = [one for one in wanted if not one.ready]
        compile_all(self.compiles, available_cores())

    def tell(self) -> None:
        """Say once what somebody waits for."""
        if self.compiles and not self._is_told:
            self._is_told = True
            modules = dict.fromkeys(one.__module__.rpartition(".")[2] for one in self.compiles)
            logging.getLogger("optsched").warning(
                "compiling %d kernels (%s), some seconds once on this machine; `optsched warmup` "
                "does it for all", len(self.compiles), ", ".join(modules),
            )  # fmt: skip


def loaded(*modules: str) -> bool:
    """Whether these modules of `optsched_solvers` (or others, by full name) can be used at once."""
    return all(map(_is_loaded, map(_full_name, modules)))


def load(monitor: Monitor, *modules: str) -> bool:
    """Import modules of `optsched_solvers` (or others, by full name); False if told to stop first.

    Their kernels, or of ``module:a,b`` those named, are taken from disk; on a new machine they are
    compiled first, for seconds, by processes that finish even if this one does not wait for them.
    Where the user gave no limit the clock stands still meanwhile.
    """
    if loaded(*modules):
        return True
    loader = _loader(modules)
    with monitor.clock.pause():
        while not loader.done.wait(_WATCH) and not loaded(*modules):
            loader.tell()
            if monitor.should_stop():
                if loader.compiles and not monitor.proved and not monitor.interrupted:
                    monitor.missing.update(name.rpartition(".")[2] for name in modules)
                return False
    if loader.failure is not None:
        raise loader.failure
    return True


def load_behind(*modules: str) -> None:
    """Begin to load what will be needed, in this order, and wait for nothing."""
    if not loaded(*modules):
        _loader(modules)


def _loader(modules: tuple[str, ...]) -> _Loader:
    """Who loads these, among others: one that is at work, or a new one."""
    names = tuple(map(_full_name, modules))
    with _lock:
        _loaders[:] = [one for one in _loaders if not one.done.is_set()]
        for one in _loaders:
            if set(names) <= set(one.modules):
                return one
        _loaders.append(_Loader(names))
        return _loaders[-1]


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name.partition(":")[0])
    if module is None or getattr(module.__spec__, "_initializing", False):
        return False
    if "optsched.kernels.compile" not in sys.modules:
        return True
    from optsched.kernels.compile import entries

    return all(one.ready for one in entries(name))


def _full_name(module: str) -> str:
    top = module.partition(".")[0]
    return module if top in _TOP else f"optsched_solvers.{module}"
