"""The jobs of a run while they are trained: a table that lives on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from optsched.arraypipe.reporting.text import duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from optsched.arraypipe.job import Job

FIRST_AFTER: Final = 1.0  # seconds of silence
EVERY: Final = 5.0  # seconds between plain lines
LIVE_EVERY: Final = 0.25  # seconds between two states of the table
_RECENT: Final = 33  # iterations from which the time of a cycle is taken


@dataclass(eq=False)
class Row:
    """What is known of one job."""

    job: Job
    title: str
    copies: int  # iterations a cycle
    iteration: int = -1
    loss: float = float("nan")
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    told: int = -1

    @property
    def cycle(self) -> float | None:
        """Seconds a cycle, from the last iterations."""
        if len(self.ends) < 2 or self.job.status != "running":
            return None
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) * self.copies

    def cells(self, steps: int) -> tuple[str, str, str, str]:
        """Name, iterations, loss, status."""
        done = f"{self.iteration + 1} of {steps}"
        loss = "-" if self.iteration < 0 else f"{self.loss:.4f}"
        return self.title, done, loss, self.job.status


class RunProgress:
    """Callable for ``on_step``; prints on stderr from time to time.

    Parameters
    ----------
    jobs, titles
        Those of the trainer.
    steps
        Iterations of every job.
    copies
        Iterations a cycle of every job.
    predicted
        Nanoseconds a cycle.
    serial
        Devices take turns, so that the measured time of a cycle is no period.
    enabled
        False: say nothing.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        titles: Sequence[str],
        steps: int,
        *,
        copies: Sequence[int],
        predicted: float,
        serial: bool,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.rows = [Row(*known) for known in zip(jobs, titles, copies, strict=True)]
        self.steps, self.predicted, self.serial = steps, predicted, serial
        self.stream = stream or sys.stderr
        self.enabled = enabled
        self.by_job = {id(row.job): row for row in self.rows}
        self.began = time.monotonic()
        self.next = self.began + FIRST_AFTER
        self.live: Any = None
        self.open = enabled and self.stream.isatty()

    def __call__(self, job: Job, iteration: int, loss: float) -> None:
        """Note a loss, and show the state if it is time to."""
        now = time.monotonic()
        row = self.by_job[id(job)]
        row.iteration, row.loss = iteration, loss
        row.ends.append(now)
        if self.enabled and now >= self.next:
            self._show(now)

    @property
    def cycle(self) -> float | None:
        """Seconds of a cycle now: the median over the jobs that run."""
        known = [row.cycle for row in self.rows]
        rates = [value for value in known if value is not None]
        return median(rates) if rates else None

    def period(self) -> str:
        """The time of a cycle against its prediction."""
        cycle = self.cycle
        measured = "-" if cycle is None else duration(cycle * 1e9)
        turns = " (devices take turns)" if self.serial else ""
        return f"a cycle: {measured}{turns}, predicted {duration(self.predicted)}"

    def lines(self) -> list[str]:
        """One line per job that has news, and one for the period."""
        news = [row for row in self.rows if row.told != row.iteration]
        width = max((len(row.title) for row in news), default=0)
        found = []
        for row in news:
            title, done, loss, status = row.cells(self.steps)
            found.append(f"{title:{width}}  iteration {done}  loss {loss}  {status}")
            row.told = row.iteration
        return [*found, self.period()] if found else []

    def _show(self, now: float) -> None:
        try:
            if self.live is not None:
                self.next = now + LIVE_EVERY
                self.live.update(self._table(), refresh=True)
                return
            self.next = now + EVERY
            text = "\n".join(f"{now - self.began:7.1f} s  {line}" for line in self.lines())
            print(text, file=self.stream, flush=True)
        except OSError:  # nobody looks any more: no reason to lose the run
            self.enabled = False

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table("job", "iteration", "loss", "status", box=box.SIMPLE)
        table.caption = self.period()
        for row in self.rows:
            table.add_row(*row.cells(self.steps))
        return table

    def __enter__(self) -> Self:
        if self.open:
            from rich.console import Console
            from rich.live import Live

            # no thread of its own: it would cost the run time at moments that nobody chose
            console = Console(file=self.stream, highlight=False)
            self.live = Live(console=console, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
            self.live = None
