"""Commands of ``optsched arraypipe``: a trainer from a script, a run of it, files and summary."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import format_json
from optsched.io.text import aligned, duration, one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from optsched.arraypipe.trainer import ArrayTrainer, RunResult
    from optsched.model.schedule import Schedule


class Summary(NamedTuple):
    """Short form of a run: as it is printed at its end, and as a document ``optsched.run/1``."""

    text: str
    document: dict[str, Any]
    failures: list[str]


def summary_of(result: RunResult, *, backend: str, steps: int, seconds: float) -> Summary:
    """Return the summary of a run; without jobs on ranks above 0, which have no losses."""
    rows = [["job", "status", "iterations", "first loss", "last loss"]]
    jobs: list[dict[str, Any]] = []
    titles = result.log.provenance["jobs"]
    for job, title, losses in zip(result.jobs, titles, result.losses, strict=False):
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        error = "" if job.error is None else str(job.error)
        jobs.append({
            "name": title, "status": job.status, "iterations": len(losses), "first_loss": first,
            "last_loss": last, "error": error,
        })  # fmt: skip
        shown = ["-" if x is None else f"{x:.4f}" for x in (first, last)]
        rows.append([one_line(title), job.status, str(len(losses)), *shown])
    errors = [job["error"] for job in jobs if job["error"]]
    lines = [*aligned(rows, left=2), *(one_line(error, 500) for error in errors)]
    if any(job["status"] == "stopped" for job in jobs):
        lines.append("interrupted: jobs ended with whole iterations")
    lines += [f"{backend} backend, {duration(seconds * 1e9)}", "", str(result.report)]
    document = {
        "format": "optsched.run/1", "backend": backend, "steps": steps, "seconds": seconds,
        "jobs": jobs, "report": result.report,
    }  # fmt: skip
    failures = [job["error"] for job in jobs if job["status"] == "failed"]
    return Summary("\n".join(lines), document, failures)


def write_results(folder: Path, summary: Summary, result: RunResult) -> None:
    """Write plan, trace and summary of a run, and print where."""
    folder.mkdir(parents=True, exist_ok=True)
    result.log.segments[0].plan.schedule.write(folder / "plan.schedule.json")
    result.trace.write(folder / "trace.schedule.json")
    document = msgspec.json.format(msgspec.json.encode(summary.document), indent=1)
    write_atomic(folder / "summary.json", document)
    write_atomic(folder / "summary.txt", f"{summary.text}\n".encode())
    print(f"wrote plan, trace and summary in {folder}", flush=True)


def read_summary(folder: Path, as_json: bool) -> str:
    """Return the summary of a run, as text or as JSON."""
    file = folder / ("summary.json" if as_json else "summary.txt")
    if not file.exists():
        raise InputError(f"{file}: no such file; `optsched arraypipe run -o` writes it")
    return read_text(file).rstrip()


def check_folder(folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written to, before anything is trained."""
    if folder is None:
        return
    parent = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not parent.is_dir():
        raise InputError(f"{folder}: cannot be made ({parent} is a file)")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{folder}: cannot be written to (no permission)")


def load_trainer(script: str) -> tuple[Path, ArrayTrainer]:
    """Return path of a script, and what its function returns: ``train.py:make_trainer``.

    The script is imported under the name of its file, so ``if __name__ == "__main__":`` keeps what
    is not for us; its folder is put on the search path, as Python does with a script. An
    `InputError` has the line of the script; without PyTorch it is a `MissingExtra`.
    """
    file, _, name = script.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(f"script: expected FILE.py:FUNCTION, got {format_json(script)}")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    module = imported(path)
    make = getattr(module, name, None)
    if not callable(make):
        offers = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise InputError(
            f"{path}: has no function {format_json(name)}; there are {', '.join(offers[:8])}"
        )
    made = guarded(path, make)
    need_torch()
    from optsched.arraypipe.trainer import ArrayTrainer

    if not isinstance(made, ArrayTrainer) or not made.jobs:
        raise InputError(
            f"{path}:{name}: expected it to return an ArrayTrainer with jobs (with_jobs), "
            f"got {made!r:.60}"
        )
    return path, made


def imported(path: Path) -> ModuleType:
    """Return a Python file as a module; what it raises is an `InputError` with the line."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: expected a Python file, such as train.py")
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(path.stem)
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


def guarded(path: Path, call: Callable[[], Any]) -> Any:
    """Call into the script; an error becomes one sentence with the line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        places = traceback.extract_tb(error.__traceback__)
        lines = [place.lineno for place in places if place.filename == str(path.resolve())]
        text = f"raises {type(error).__name__}: {error}"
        if isinstance(error, OptschedError):
            if not isinstance(error, InputError) or not lines:
                raise
            text = str(error)
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
        line = f":{lines[-1]}" if lines and lines[-1] else ""  # the innermost
        raise InputError(f"{path}{line}: {text}") from error


def need_torch() -> None:
    """Say what to install if PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the executor", "torch")


def run_script(
    script: str,
    given: Schedule | None,
    steps: int,
    out: Path | None,
    settings: dict[str, Any],
    **options: Any,
) -> bool:
    """Train the jobs of a script; print the summary, write it to `out`; whether no job failed."""
    check_folder(out)
    path, trainer = load_trainer(script)
    from optsched.arraypipe.options import RunConfig

    config = RunConfig(**{**vars(trainer.config), **settings})
    began = time.perf_counter()

    def fitted() -> Any:
        return trainer.fit(trainer.jobs, steps, schedule=given, config=config, **options)

    # on ranks also an error of another rank ends this one: it is no error of the script
    result = fitted() if config.on_ranks else guarded(path, fitted)
    summary = summary_of(
        result, backend="process" if config.on_ranks else "inline", steps=steps,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
    if config.is_first:
        print(summary.text, flush=True)
        if out is not None:
            write_results(out, summary, result)
        for failure in summary.failures:
            print(one_line(f"failed: {failure}", 10**5), file=sys.stderr, flush=True)
    return not summary.failures
