"""Train a script's jobs by a schedule, as a process per device."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from optsched.arraypipe.cli.output import RunFiles, RunSummary, made_folder, summary_of
from optsched.arraypipe.cli.script import load_trainer, measured, script_parts
from optsched.errors import InputError, MissingExtra
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.cli.output import RunProgress
    from optsched.arraypipe.distributed.launch import RankGroup
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.trainer import ArrayTrainer


@contextmanager
def plain_warnings(speaks: bool = True) -> Iterator[None]:
    """Print every warning once, as ``warning: <sentence>``; which count the filters decide.

    Parameters
    ----------
    speaks
        False: say none of them, such as on ranks above 0.
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


Backend = Literal["inline", "process"]


@dataclass(frozen=True)
class RunOrder:
    """What to train, how long, and where results go.

    Parameters
    ----------
    script
        ``FILE.py:FUNCTION`` that makes the trainer.
    schedule
        A schedule document; None: blocks are measured and ordered first.
    steps
        Iterations of every job, counted from its seed.
    checkpoint, every, resume
        Folder of checkpoints, iterations between two of them, whether to go on from the latest.
    out
        Folder for plan, trace, replay and summary.
    time_limit
        Seconds for the solver, if there is no schedule.
    devices
        How many, if there is no schedule; by default one per stage, or per process.
    quiet
        Say nothing but the summary.
    """

    script: str
    schedule: Path | None = None
    steps: int = 100
    checkpoint: Path | None = None
    every: int | None = None
    resume: bool = False
    out: Path | None = None
    time_limit: float = 10.0
    devices: int | None = None
    quiet: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is loaded or made."""
        script_parts(self.script)
        if self.steps < 1:
            raise InputError(f"steps: expected an integer >= 1, got {self.steps}")
        if self.every is not None and self.every < 1:
            raise InputError(f"every: expected an integer >= 1, got {self.every}")
        if self.checkpoint is None and (self.every is not None or self.resume):
            what = "resume" if self.resume else "every"
            raise InputError(f"{what}: say where checkpoints are, with --checkpoint DIR")
        if not 0 < self.time_limit < 10**6:
            raise InputError(f"time_limit: expected seconds above 0, got {self.time_limit:g}")
        if self.schedule is not None and self.devices is not None:
            raise InputError("devices: the schedule says how many there are")

    def words(self) -> list[str]:
        """The same as arguments of this module."""
        found = [self.script] + ([] if self.schedule is None else [str(self.schedule)])
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value is True:
                found.append(_flag(field.name))
            elif value is not None and value is not False:
                found.append(f"{_flag(field.name)}={value}")
        return found


def carry_out(order: RunOrder, group: RankGroup | None = None) -> RunSummary:
    """Load, compile, train, write, and print, warnings too; on ranks other than 0 only train.

    Parameters
    ----------
    order
        What to do.
    group
        The processes, one per device; None: all devices in this one.

    Raises
    ------
    InputError
        Something does not fit; nothing has been trained then.
    """
    order.check()
    with plain_warnings(group is None or group.is_first):
        return _carried_out(order, group)


def _carried_out(order: RunOrder, group: RankGroup | None) -> RunSummary:
    backend: Backend = "inline" if group is None else "process"
    is_first = group is None or group.is_first
    given = None if order.schedule is None else Schedule.read(order.schedule)
    trainer = load_trainer(order.script)
    say = _say if is_first and not order.quiet else _nothing
    if given is None:
        from optsched.arraypipe.fit import schedule_for

        measure = partial(
            schedule_for, trainer, order.devices, time_limit=order.time_limit, say=say
        )
        # on ranks another one's end is an error here too, and whose it is the group finds out
        given = measured(order.script, measure) if group is None else measure()
    plan = trainer.plan(given)
    if group is not None:
        group.check_size(len(plan.devices))
    progress = _progress(trainer, plan, order, backend, is_first)
    began = time.perf_counter()
    with made_folder(order.out if is_first else None), progress:
        result = trainer.run(
            plan, order.steps, checkpoint=order.checkpoint, checkpoint_every=order.every,
            resume=order.resume, on_step=progress, backend=backend,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    if not is_first:
        return RunSummary(
            backend=backend, steps=order.steps, seconds=seconds, jobs=(), report=result.report
        )
    summary = summary_of(trainer, result, backend=backend, steps=order.steps, seconds=seconds)
    files = None if order.out is None else RunFiles.within(order.out)
    if files is not None:
        files.write(summary, given, result)  # before anything is printed: that may fail
    print(summary, flush=True)
    if files is not None:
        print(f"wrote {', '.join(path.name for path in files)} in {order.out}", flush=True)
    return summary


def _progress(
    trainer: ArrayTrainer, plan: ExecutionPlan, order: RunOrder, backend: Backend, is_first: bool
) -> RunProgress:
    from optsched.arraypipe.cli.output import RunProgress
    from optsched.arraypipe.report.executed import unit
    from optsched.arraypipe.report.explain import predict
    from optsched.arraypipe.runtime.environment import resolve

    devices = resolve(trainer.devices, plan.devices) if backend == "inline" else ()
    return RunProgress(
        trainer.jobs, trainer.titles, order.steps, copies=plan.copies,
        predicted=predict(plan).period * unit(plan),
        serial=len(devices) > 1 and len(set(devices)) == 1,
        enabled=is_first and not order.quiet,
    )  # fmt: skip


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(line: str) -> None:
    pass


class _Parser(argparse.ArgumentParser):
    """Errors as `InputError`, so that only one of the ranks says them."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parsed(words: Sequence[str] | None) -> RunOrder:
    parser = _Parser(
        prog="python -m optsched.arraypipe.cli.run",
        description="Train the jobs of a script by a schedule, one process per device (torchrun).",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="FILE.py:FUNCTION that makes the ArrayTrainer")
    parser.add_argument("schedule", nargs="?", type=Path, help="[default: measure and solve]")
    options: tuple[tuple[str, dict[str, Any]], ...] = (
        ("steps", {"type": int, "help": "iterations of every job [default: 100]"}),
        ("checkpoint", {"type": Path, "help": "folder for checkpoints"}),
        ("every", {"type": int, "help": "iterations between checkpoints [default: at the end]"}),
        ("resume", {"action": "store_true", "help": "go on from the latest checkpoints"}),
        ("out", {"type": Path, "help": "folder for plan, trace, replay and summary"}),
        ("time_limit", {"type": float, "help": "seconds for the solver, without a schedule"}),
        ("devices", {"type": int, "help": "how many, without a schedule"}),
        ("quiet", {"action": "store_true", "help": "print the summary only"}),
    )
    for name, settings in options:
        parser.add_argument(_flag(name), default=argparse.SUPPRESS, **settings)
    return RunOrder(**vars(parser.parse_args(words)))


def main(words: Sequence[str] | None = None) -> int:
    """Entry point of every process; exit codes: 0 done, 1 a job failed, 2 bad input."""
    if words is None:
        words = sys.argv[1:]
    if "-h" in words or "--help" in words:
        _parsed(words)
    from optsched.arraypipe.distributed.launch import RankGroup

    # in the background of a script Ctrl-C would be ignored, which is how one is told to end here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        group = RankGroup()
    except (InputError, MissingExtra) as error:
        _say(f"error: {error}")
        return 2
    with group.sharing_errors():
        summary = carry_out(_parsed(words), group)
        for failure in summary.failures:
            _say(f"failed: {failure}")
        return group.agreed(1 if summary.failures else 0)
    raise AssertionError("unreachable: an error ends the process")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written; threads of gloo can abort an interpreter that takes its time
