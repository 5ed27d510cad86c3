"""Commands of ``optsched arraypipe``: a trainer from a script, a run of it, files and summary."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from optsched.arraypipe.report.report import Report  # noqa: TC001 (msgspec reads annotations)
from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import decode_document, format_json, parse
from optsched.io.text import aligned, duration, plain
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.arraypipe.training_run import RunResult


T = TypeVar("T")
FORMAT: Final = "optsched.run/1"
_SUMMARY: Final = "summary.json"


class JobSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job ended; `iterations` are those of this run."""

    name: str
    status: str
    iterations: int
    first_loss: float | None
    last_loss: float | None
    error: str = ""


class RunSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Short form of a run; `str` gives what is printed at its end."""

    format: str = FORMAT
    backend: str
    steps: int
    seconds: float
    jobs: tuple[JobSummary, ...]
    report: Report

    @property
    def failures(self) -> list[str]:
        """Why jobs failed, a sentence each."""
        return [job.error for job in self.jobs if job.status == "failed"]

    def __str__(self) -> str:
        rows = [["job", "status", "iterations", "first loss", "last loss"]]
        for job in self.jobs:
            losses = ["-" if x is None else f"{x:.4f}" for x in (job.first_loss, job.last_loss)]
            rows.append([plain(job.name), plain(job.status, 7), str(job.iterations), *losses])
        head, *body = aligned(rows, left=2)
        lines = [head]
        for line, job in zip(body, self.jobs, strict=True):
            lines += [line, f"  {plain(job.error, 500)}"] if job.error else [line]
        lines.append("")
        if any(job.status == "stopped" for job in self.jobs):
            lines.append("interrupted: jobs ended with whole iterations")
        backend = f"{self.backend} backend, {duration(self.seconds * 1e9)}"
        return "\n".join([*lines, backend, "", str(self.report)])


def summary_of(result: RunResult, *, backend: str, steps: int, seconds: float) -> RunSummary:
    """Return the summary of a run; without jobs on ranks above 0, which have no losses."""
    jobs = []
    titles = result.log.provenance["jobs"]
    for job, title, losses in zip(result.jobs, titles, result.losses, strict=False):
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        error = "" if job.error is None else str(job.error)
        jobs.append(JobSummary(title, job.status, len(losses), first, last, error))
    return RunSummary(
        backend=backend, steps=steps, seconds=seconds, jobs=tuple(jobs), report=result.report
    )


def write_results(folder: Path, summary: RunSummary, result: RunResult) -> str:
    """Write plan, trace and summary of a run; return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = result.log.segments[0].plan.schedule
    for name, document in {"plan": plan, "trace": result.trace}.items():
        document.write(folder / f"{name}.schedule.json")
    write_atomic(folder / _SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return f"plan.schedule.json, trace.schedule.json, {_SUMMARY}"


def read_summary(path: Path) -> RunSummary:
    """Read the summary of a run, given as its folder or as the file itself."""
    file = path / _SUMMARY if path.is_dir() else path
    if file != path and not file.exists():
        raise InputError(f"{file}: no such file; `optsched arraypipe run --out` writes it")
    return decode_document(parse(read_text(file), str(file)), RunSummary, FORMAT, str(file))


def check_folder(folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written to, before anything is trained."""
    if folder is None:
        return
    parent = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not parent.is_dir():
        raise InputError(f"{folder}: cannot be made ({parent} is a file)")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{folder}: cannot be written to (no permission)")


def load_trainer(script: str) -> ArrayTrainer:
    """Run a script and call its function, such as ``train.py:make_trainer``.

    The script is imported under the name of its file, so ``if __name__ == "__main__":`` keeps what
    is not for us; its folder is put on the search path, as Python does with a script. An
    `InputError` has the line of the script; without PyTorch it is a `MissingExtra`.
    """
    path, name = script_parts(script)
    module = imported(path)
    make = getattr(module, name, None)
    if make is None:
        raise InputError(f"{path}: has no function {format_json(name)}{_offers(module)}")
    if not callable(make):
        raise InputError(f"{path}:{name}: expected a function, got {make!r:.60}")
    made = guarded(path, make)
    need_torch()
    from optsched.arraypipe.trainer import ArrayTrainer

    if not isinstance(made, ArrayTrainer):
        raise InputError(f"{path}:{name}: expected it to return an ArrayTrainer, got {made!r:.60}")
    return made


def script_parts(script: str) -> tuple[Path, str]:
    """File and function of ``FILE.py:FUNCTION``; `InputError` if it is not one or not there."""
    file, _, name = script.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(f"script: expected FILE.py:FUNCTION, got {format_json(script)}")
    path = Path(file)
    if path.is_dir():
        raise InputError(f"{path}: is a directory, expected a Python file")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    return path, name


def imported(path: Path) -> ModuleType:
    """A Python file as a module; what it raises is an `InputError` with the line."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: expected a Python file, such as train.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    loader = spec.loader
    try:
        guarded(path, lambda: loader.exec_module(module))
    except BaseException:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def guarded(path: Path, call: Callable[[], T]) -> T:
    """What a call into the script gives; whatever it raises becomes a sentence with the line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        source = str(path.resolve())
        places = traceback.extract_tb(error.__traceback__)
        lines = [
            place.lineno for place in places if place.filename == source
        ]  # the innermost is last
        text = str(error)
        if isinstance(error, OptschedError):
            if not isinstance(error, InputError) or not lines:
                raise
        elif isinstance(error, SystemExit):
            text = (
                "ends the program; put what is only for the command line below "
                'if __name__ == "__main__":'
            )
        elif isinstance(error, ModuleNotFoundError):
            if (error.name or "").partition(".")[0] == "torch":
                raise MissingExtra("the executor", "torch") from None
        elif isinstance(error, SyntaxError):
            lines, text = [error.lineno], f"is not Python ({error.msg})"
        else:
            text = f"raises {type(error).__name__}: {error}"
        line = f":{lines[-1]}" if lines and lines[-1] else ""
        raise InputError(f"{path}{line}: {text}") from error


def _offers(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and not name.startswith("_")
    ]
    return f"; there are {', '.join(names[:8])}" if names else ""


def need_torch() -> None:
    """Say what to install if PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the executor", "torch")


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
