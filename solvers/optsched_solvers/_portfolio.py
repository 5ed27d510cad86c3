"""Several engines at once on one problem: threads, their processor cores, one shared monitor."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from optsched.solving.monitor import Monitor
from optsched.solving.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.solving.limits import Limits


def chosen_cores(workers: int) -> tuple[int, ...]:
    """Choose cores among those this process may use; () where threads cannot be confined.

    Processes side by side begin at different cores, so that they do not compete for the first.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() * workers % len(cores)
    return tuple((cores[first:] + cores[:first])[:workers])


def core_of(cores: tuple[int, ...], k: int) -> tuple[int, ...]:
    """The core of engine k, in turn; () where there are none."""
    return cores[k % len(cores) :][:1] if cores else ()


@contextmanager
def confined(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep this thread, and the threads it starts meanwhile, on these cores; () = no change."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class PortfolioMember:
    """A shared monitor as one engine sees it: it can be stopped without the others."""

    def __init__(self, shared: Monitor, is_over: Callable[[], bool]) -> None:
        self._shared, self._is_over = shared, is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def should_stop(self) -> bool:
        """Whether this engine, or all, should stop."""
        return self._is_over() or self._shared.should_stop()


def member(shared: Monitor, is_over: Callable[[], bool]) -> Monitor:
    """A `PortfolioMember` under the type that engines take."""
    return cast("Monitor", PortfolioMember(shared, is_over))


class SubSearch(Monitor):
    """Monitor of a short search inside another one, which ends at the latest with the outer one."""

    def __init__(self, limits: Limits, is_over: Callable[[], bool]) -> None:
        super().__init__(limits)
        self._is_over = is_over

    def should_stop(self) -> bool:
        """Whether this search or the outer one is over."""
        return self._is_over() or super().should_stop()


class Portfolio:
    """Runs engines in threads until one of them has a proof or the monitor stops them all.

    Kernels release the interpreter lock, so the engines work in parallel.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._infeasible: Result | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, engine: Callable[[Monitor], Result | None], cores: tuple[int, ...] = ()) -> None:
        """Start an engine on these processor cores."""
        thread = threading.Thread(target=self._run, args=(engine, cores), daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait; whether any engine is still working and should be."""
        self._over.wait(seconds)
        working = any(thread.is_alive() for thread in self._threads)
        return working and not self._over.is_set() and not self.monitor.should_stop()

    def finish(self) -> Result:
        """Stop all engines, join their threads, and raise the first exception of an engine.

        An engine with a refuted bound drops out; its exception is not raised.
        """
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._infeasible or Result("unknown")

    def _run(self, engine: Callable[[Monitor], Result | None], cores: tuple[int, ...]) -> None:
        try:
            with confined(cores):
                found = engine(member(self.monitor, self._over.is_set))
            if found is not None and found.status == "infeasible":
                self._infeasible = found
                if self.monitor.objective is None:
                    self._over.set()
        except BaseException as error:
            if not self.monitor.contradiction:
                self._failure = self._failure or error
                self._over.set()
