"""Train a script's jobs by a schedule: in this process, or as one of the processes of a run."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from optsched.arraypipe.cli.output import (
    RunProgress,
    RunSummary,
    check_folder,
    summary_of,
    write_results,
)
from optsched.arraypipe.cli.script import guarded, load_trainer, need_torch, script_parts
from optsched.errors import InputError, MissingExtra, OptschedError, UnsupportedProblem
from optsched.io.text import plain
from optsched.io.values import integer, number
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.trainer import ArrayTrainer


@contextmanager
def plain_warnings(speaks: bool = True) -> Iterator[None]:
    """Print every warning once, as ``warning: <sentence>``; which count the filters decide.

    Ranks above 0 do not speak.
    """
    told: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        sentence = " ".join(str(message).split())
        if speaks and sentence not in told:
            told.add(sentence)
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@dataclass(frozen=True)
class RunOrder:
    """What to train, how long, and where results go."""

    script: str  # FILE.py:FUNCTION that makes the trainer
    schedule: Path | None = None  # None: blocks are measured and ordered first
    steps: int = 100  # iterations of every job, counted from its seed
    options: dict[str, Any] = field(default_factory=dict)  # of `ArrayTrainer.run`
    out: Path | None = None  # folder for plan, trace and summary
    time_limit: float = 10.0  # seconds for the solver, if there is no schedule
    devices: int | None = None  # if there is no schedule; by default one per stage, or per process
    quiet: bool = False  # say nothing but the summary

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is loaded or made."""
        script_parts(self.script)
        need_torch()
        from optsched.arraypipe.training_run import RunOptions

        integer("steps", self.steps, 1)
        RunOptions(**self.options)
        number("time_limit", self.time_limit, 0.0, 1e6, above=True, what="seconds")
        if self.schedule is not None and self.devices is not None:
            raise InputError("devices: the schedule says how many there are")


def carry_out(order: RunOrder, group: Group | None = None) -> RunSummary:
    """Load, compile, train, write, and print, warnings too; on ranks other than 0 only train.

    The group has one process per device; without it all devices are in this one. `InputError`:
    something does not fit, and nothing has been trained.
    """
    is_first = group is None or group.rank == 0
    with plain_warnings(is_first):

        def loaded() -> tuple[ArrayTrainer, Schedule | None]:
            order.check()
            given = None if order.schedule is None else Schedule.read(order.schedule)
            trainer = load_trainer(order.script)
            check_folder(order.out if is_first else None)
            return trainer, given

        trainer, given = loaded() if group is None else group.agree(loaded)
        return _trained(order, trainer, given, group)


def _trained(
    order: RunOrder, trainer: ArrayTrainer, given: Schedule | None, group: Group | None
) -> RunSummary:
    from optsched.arraypipe.fit import schedule_for

    is_first = group is None or group.rank == 0
    loud = is_first and not order.quiet

    def measured() -> Schedule:
        tell = say if loud else lambda line: None
        return schedule_for(trainer, order.devices, time_limit=order.time_limit, say=tell)

    if given is None:
        # on ranks another one's end is an error here too, and whose it is the group finds out
        path, _ = script_parts(order.script)
        given = guarded(path, measured) if group is None else measured()
    plan = trainer.plan(given)
    progress = RunProgress.of(trainer, plan, order.steps, group is None, loud)
    backend = "inline" if group is None else "process"
    began = time.perf_counter()
    with progress:
        result = trainer.run(plan, order.steps, on_step=progress, backend=backend, **order.options)
    seconds = time.perf_counter() - began
    summary = summary_of(trainer, result, backend=backend, steps=order.steps, seconds=seconds)
    if not is_first:
        return summary
    names = ""
    if order.out is not None:  # before anything is printed: that may fail
        names = write_results(order.out, summary, given, result)
    print(summary, flush=True)
    if names:
        print(f"wrote {names} in {order.out}", flush=True)
    for failure in summary.failures:
        say(f"failed: {failure}")
    return summary


def as_rank(order: RunOrder) -> NoReturn:
    """One process of several, however they were started; ends it, with one sentence for all.

    SIGTERM, which schedulers of clusters send ahead, is taken for Ctrl-C. `InputError`: the
    environment does not say which of how many processes this is.
    """
    need_torch()
    from optsched.arraypipe.distributed.group import Group, join
    from optsched.arraypipe.distributed.transport import PeerLost

    # in the background of a script Ctrl-C would be ignored, which is how one is told to end here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    join()
    group, code = Group(name="program"), 0
    try:
        code = 1 if carry_out(order, group).failures else 0
    except BaseException as error:
        code, sentence = _ending(error)
        if group.speaks(isinstance(error, PeerLost)) and sentence != "interrupted":
            say(sentence)
    sys.stdout.flush()
    os._exit(code)  # all is written; threads of gloo can abort an interpreter that takes its time


def _ending(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, (InputError, UnsupportedProblem, MissingExtra)):
        return 2, f"error: {error}"
    if isinstance(error, OptschedError):
        return 1, f"failed: {error}"
    if isinstance(error, SystemExit):
        return 1, f"failed: the script ends the program ({error.code})"
    return 1, f"failed: {type(error).__name__}: {error}"


def say(line: str) -> None:
    """One line on stderr, whatever it holds."""
    print(plain(" ".join(line.split()), 10**5), file=sys.stderr, flush=True)
