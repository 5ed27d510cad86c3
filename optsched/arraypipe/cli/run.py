"""Train the jobs of a script by `ArrayTrainer.fit`."""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.cli.output import RunSummary, check_folder, summary_of, write_results
from optsched.arraypipe.cli.script import guarded, load_trainer, script_parts
from optsched.errors import InputError
from optsched.io.text import plain
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print every warning once, as ``warning: <sentence>``."""
    printed: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        sentence = " ".join(str(message).split())
        if sentence not in printed:
            printed.add(sentence)
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def run_script(
    script: str,
    schedule: Path | None,
    steps: int,
    out: Path | None,
    settings: dict[str, Any],
    **options: Any,
) -> RunSummary:
    """Train the jobs of a script; print the summary, and write it with plan and trace to `out`.

    Parameters
    ----------
    script
        ``FILE.py:FUNCTION``, which returns a trainer with jobs (`ArrayTrainer.with_jobs`).
    settings
        Fields of `RunConfig`.
    options
        Of `ArrayTrainer.fit`.
    """
    path, name = script_parts(script)
    given = None if schedule is None else Schedule.read(schedule)
    check_folder(out)
    trainer = load_trainer(script)
    if not trainer.jobs:
        raise InputError(f"{path}:{name}: expected a trainer with jobs, as with_jobs returns")
    from optsched.arraypipe.options import RunConfig, is_first_rank

    config = RunConfig(**{**vars(trainer.config), **settings})
    began = time.perf_counter()

    def fitted() -> Any:
        return trainer.fit(trainer.jobs, steps, schedule=given, config=config, **options)

    # on ranks also an error of another rank ends this one: it is no error of the script
    with plain_warnings():
        result = fitted() if config.on_ranks else guarded(path, fitted)
    summary = summary_of(
        result, backend="process" if config.on_ranks else "inline", steps=steps,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
    if not is_first_rank():
        return summary
    names = "" if out is None else write_results(out, summary, result)
    print(summary, flush=True)
    if names:
        print(f"wrote {names} in {out}", flush=True)
    for failure in summary.failures:
        print(plain(f"failed: {failure}", 10**5), file=sys.stderr, flush=True)
    return summary
