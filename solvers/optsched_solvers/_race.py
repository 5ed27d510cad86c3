"""Several engines at once on one problem, with one incumbent and one bound between them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from optsched.solving.monitor import Monitor
from optsched.solving.result import Result
from optsched_solvers._cores import confined

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.solving.limits import Limits


class Lap(Monitor):
    """The shared monitor as one engine sees it: same state, but it may be told to stop alone."""

    __slots__ = ("_over",)  # its only own attribute: the rest of its state is the shared one's

    def __init__(self, shared: Monitor, over: Callable[[], bool]) -> None:
        self.__dict__ = shared.__dict__
        self._over = over

    def should_stop(self) -> bool:
        """Whether the race or this lap is over."""
        return self._over() or super().should_stop()


class Aside(Monitor):
    """Keeps what a short run of another engine finds, and ends it when the whole search ends."""

    def __init__(self, limits: Limits, over: Callable[[], bool]) -> None:
        super().__init__(limits)
        self._over = over

    def should_stop(self) -> bool:
        """Whether either is over."""
        return self._over() or super().should_stop()


class Race:
    """Runs engines in threads until one has the answer or the monitor says stop.

    Every engine reports to the same monitor, reads the others' incumbents and bounds from it, and
    releases the interpreter lock in its kernels.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.infeasible: Result | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def enter(
        self, engine: Callable[[Monitor], Result | None], cores: tuple[int, ...] = ()
    ) -> None:
        """Start an engine, confined to these cores."""
        thread = threading.Thread(target=self._run, args=(engine, cores), daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def running(self) -> bool:
        """Whether any engine is still at work, and should be."""
        at_work = any(thread.is_alive() for thread in self._threads)
        return at_work and not self._over.is_set() and not self.monitor.should_stop()

    def wait(self, seconds: float) -> bool:
        """Wait a little; whether the race goes on."""
        self._over.wait(seconds)
        return self.running

    def finish(self) -> Result:
        """Stop all engines and wait for them; raises what one of them raised.

        An engine whose claims were refuted only drops out: the others go on.
        """
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self.infeasible or Result("unknown")

    def _run(self, engine: Callable[[Monitor], Result | None], cores: tuple[int, ...]) -> None:
        try:
            with confined(cores):
                found = engine(Lap(self.monitor, self._over.is_set))
            if found is not None and found.status == "infeasible":
                self.infeasible = found
                if self.monitor.objective is None:
                    self._over.set()
        except BaseException as error:
            if not self.monitor.contradiction:
                self._failure = self._failure or error
                self._over.set()
