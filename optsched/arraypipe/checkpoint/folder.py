"""Checkpoints per job, each at its own iteration boundary, whole or not at all."""

from __future__ import annotations

import math
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from optsched.arraypipe.checkpoint.files import (
    check_writable,
    copied,
    damage,
    load,
    numbered,
    replace_file,
    save,
    sweep,
    tried,
    write_folder,
    writing,
)
from optsched.arraypipe.checkpoint.plain import NotKept, reread
from optsched.arraypipe.checkpoint.states import (
    Seen,
    check_job,
    check_same_arguments,
    check_same_model,
    check_same_scheduler,
    dry_shards,
    joined,
    makers,
    model_arguments,
    restore,
    shard_of,
    watched,
)
from optsched.arraypipe.model.optimizers import check_same_makers
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InputError
from optsched.io.files import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from optsched.arraypipe.job import Data
    from optsched.arraypipe.runtime.state import JobRun


_FORMAT: Final = "optsched.train/3"
_DIGITS: Final = 18  # of an iteration
_MUST_AGREE: Final = ("seed", "batch_size", "microbatches", "precision", "clip_norm")


@dataclass
class _JobState:
    """What the folder knows of a job of this run."""

    makers: dict[str, Any]  # what its optimizers and scheduler were made with
    order: list[str]  # of the entries of its state dict
    seen: Seen  # its newest batch
    kept: int  # newest iteration whose stages of this process are copied
    noted: dict[int, dict[int, _Noted]] = field(default_factory=dict)  # copies: iteration, stage
    given: list[Future[None]] = field(default_factory=list)  # to be written


@dataclass(eq=False)
class CheckpointFolder:
    """``<folder>/<job>/<iteration>/{model.pt,train.pt}``, ``<job>/latest`` and ``<job>/best``.

    A stage is copied right after its update, because it may begin the next iteration before the
    other stages have finished this one; when the last stage is in, the job is written. Where
    several processes hold the stages, each writes its own into ``.parts-<iteration>``, and the one
    that completes them writes the job. When that is done older checkpoints are removed.

    A thread writes while the run goes on. A job waits for its last checkpoint before it gives the
    next one to be written; what writing raises is raised then, or at the end of the run.
    """

    folder: Path  # made if it is not there; on a file system that all processes share
    cuts: tuple[str, ...]  # blocks at which stages 1, 2, ... begin, noted in the checkpoint
    every: int | None  # write after every so many iterations; None: only after a job's last one
    keep: int = 2  # newest checkpoints of a job that are not removed; nor is the best one
    is_first: bool = True  # of the processes: it tidies up, and no other may write before
    stages_of: Callable[[JobRun], Collection[int]] | None = None  # trained here; None: all
    jobs: dict[int, _JobState] = field(default_factory=dict)
    fallen_back: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # by title
    threads: int = field(default_factory=torch.get_num_threads)

    def __post_init__(self) -> None:
        self.writer = ThreadPoolExecutor(1, "optsched-checkpoint")

    def prepare(self, titles: Iterable[str], resume: bool) -> None:
        """Make the folders; refuse one that cannot be written, or that has another run in it.

        What a killed run has left half done is removed; a damaged checkpoint is set aside.
        """
        for title in titles:
            place = self.folder / title
            check_writable(place)
            if not resume:
                self.check_unused(title)
            if not self.is_first:
                continue
            with writing(place):
                sweep(place)
                self._set_aside(title)
                self._tidy(place)

    def check_unused(self, title: str) -> None:
        """Refuse a job that has checkpoints already."""
        place = self.folder / title
        if _newest(place):
            raise InputError(
                f"checkpoint: {place} already has checkpoints; choose another folder, or "
                f"resume=True to go on from them"
            )

    def latest(self, title: str) -> int:
        """Iteration of the newest checkpoint of a job that can be read, 0 if it has none.

        In a run of several processes the first one asks, and tells the others.
        """
        place = self.folder / title
        newest = _newest(place)
        reason = damage(place / str(newest)) if newest else ""
        if not reason:
            return newest
        for at in reversed(numbered(place)):
            if at < newest and not damage(place / str(at)):
                self.fallen_back[title] = (newest, at, reason)
                return at
        model = place / str(newest) / "model.pt"
        rescue = f"; its weights can be read: Job(init={str(model)!r}) begins with them"
        raise InputError(
            f"{place / str(newest)}: {reason}, and there is no older checkpoint; restore it from a "
            f"copy, or train in another folder{'' if tried(model)[0] else rescue}"
        )

    def begin(self, run: JobRun, at: int) -> str:
        """Take in a job with fresh stages, and go on from its checkpoint of iteration `at`, if > 0.

        Notes what the optimizers and schedulers were made with; some change their own settings
        while they train. A job whose state no checkpoint can keep is not taken in: why, or "".
        """
        order = list(run.model.state_dict())
        state = self.jobs[run.index] = _JobState({}, order, Seen(at, run.title), at)
        try:
            state.makers = copied(makers(run), f"checkpoint of job {run.title}")
            reread(self._files(run, at, dry_shards(run)))
            check_job(run)
        except NotKept as error:
            return str(error)
        place = self.folder / run.title / str(at)
        try:
            state.seen.expected = self._restore(run, at, place) if at else {}
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, (InputError, torch.OutOfMemoryError)):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(f"{place}: is damaged, or no checkpoint ({reason})") from error
        return ""

    def watched(self, run: JobRun, data: Data) -> Data:
        """The data of a job, compared with those that its checkpoint was trained on."""
        seen = self.jobs[run.index].seen
        return watched(data, seen, lambda: 0 in self._here(run))

    def note(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage that has just finished an iteration, if that iteration is to be kept."""
        done = iteration + 1
        if done == run.end or (self.every is not None and done % self.every == 0):
            with _failing(run, stage, iteration):
                self._take(run, stage, done)

    def mark_best(self, run: JobRun, done: int, value: float, highest: bool = False) -> None:
        """Note how good a job is after so many iterations; its lowest value is never removed.

        Or its highest one. Where the other was the best before, the comparison begins anew.

        Called when all stages have been noted, in one process that has them all. An iteration that
        has no checkpoint, and a value that is no number, are passed over.
        """
        self._submit(run, partial(self._mark, self.folder / run.title, done, float(value), highest))

    def finish(self, run: JobRun) -> None:
        """After the run: write the last iteration of a job if that is not done yet.

        Some stages may have finished it before it was known to be the last. A job that has failed
        keeps its earlier checkpoints.
        """
        state = self.jobs[run.index]
        done = min(run.begin, run.end)  # other processes run tombstones to the end of a segment
        with _failing(run, 0, done - 1):
            if run.job.status != "failed" and done > state.kept:
                for stage in self._here(run):
                    if stage not in state.noted.get(done, ()):
                        self._take(run, stage, done)
            state.noted.clear()
            self.settle(run.index)

    def close(self) -> None:
        """Wait until all is written; what that raises has been raised by `finish`."""
        self.writer.shutdown()

    def settle(self, job: int) -> None:
        """Wait until all that a job has given to be written is there, from this process."""
        given, self.jobs[job].given = self.jobs[job].given, []
        for future in given:
            future.result()

    def _here(self, run: JobRun) -> Collection[int]:
        return range(len(self.cuts) + 1) if self.stages_of is None else self.stages_of(run)

    def _submit(self, run: JobRun, write: Callable[[], None]) -> None:
        def written() -> None:
            with writing(self.folder / run.title):
                write()

        self.jobs[run.index].given.append(self.writer.submit(written))

    def _take(self, run: JobRun, stage: int, done: int) -> None:
        """Copy a stage; with the last one of this process the thread has all of them to write."""
        state, device = self.jobs[run.index], run.stages[stage].device
        shard = shard_of(run, stage)
        shard["batch"] = state.seen.batch(done - 1) if stage == 0 else {}
        there = torch.cuda.current_stream(device).record_event() if on_gpu(device) else None
        noted = state.noted.setdefault(done, {})
        noted[stage] = _Noted(shard, there)
        if len(noted) == len(self._here(run)):
            state.kept = done
            self.settle(run.index)  # one checkpoint of a job at a time, as they take memory
            self._submit(run, partial(self._write, run, done, state.noted.pop(done)))

    def _write(self, run: JobRun, done: int, noted: Mapping[int, _Noted]) -> None:
        """Write a checkpoint; or leave its parts, unless they are the last ones that were missing.

        A process leaves the next parts only when it is done with these, so that no two processes
        write the same job at one time.
        """
        place = self.folder / run.title
        merging = place / f".merging-{done}"
        for row in noted.values():
            row.wait()
        shards = {stage: row.shard for stage, row in noted.items()}
        if len(shards) < len(self.cuts) + 1:
            parts = place / f".parts-{done}"
            parts.mkdir(exist_ok=True)
            for stage, shard in shards.items():
                save(shard, parts / f"{stage}.tmp")
                (parts / f"{stage}.tmp").rename(parts / f"{stage}.pt")
            try:
                if sum(entry.suffix == ".pt" for entry in parts.iterdir()) < len(self.cuts) + 1:
                    return
                parts.rename(merging)
            except FileNotFoundError:  # another process has seen that they are all there
                return
            shards = {s: load(merging / f"{s}.pt") for s in range(len(self.cuts) + 1)}
        files = self._files(run, done, [shards[s] for s in sorted(shards)])
        write_folder(place / str(done), files)
        replace_file(place / "latest", f"{done}\n")
        shutil.rmtree(merging, ignore_errors=True)
        self._tidy(place)

    def _set_aside(self, title: str) -> None:
        """Let the checkpoint that is gone on from be the newest, and say so."""
        if title not in self.fallen_back:
            return
        place, (newest, at, reason) = self.folder / title, self.fallen_back.pop(title)
        warnings.warn(
            f"{place / str(newest)}: {reason}; job {title} goes on from iteration {at}, "
            f"and what is left of iteration {newest} becomes {newest}.damaged",
            stacklevel=2,
        )
        if (place / str(newest)).exists():
            (place / str(newest)).replace(place / f"{newest}.damaged")
        replace_file(place / "latest", f"{at}\n")

    def _mark(self, place: Path, done: int, value: float, highest: bool) -> None:
        _, best, was_highest = _best(place)
        better = value > best if highest else value < best
        if (better or (was_highest != highest and not math.isnan(value))) and done in numbered(
            place
        ):
            replace_file(place / "best", f"{done} {value!r}{' highest' if highest else ''}\n")
            self._tidy(place)

    def _tidy(self, place: Path) -> None:
        """Remove the checkpoints that are neither the best nor among the newest."""
        newest, best = _newest(place), _best(place)[0]
        for done in [done for done in numbered(place) if done <= newest][: -self.keep]:
            if done != best:  # its name goes at once
                old = (place / str(done)).rename(place / f".tmp-old-{done}")
                shutil.rmtree(old)

    def _files(
        self, run: JobRun, done: int, shards: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What a checkpoint consists of, by the names of its files; no tensor is read."""
        state = self.jobs[run.index]
        whole = joined(shards, run.title)
        train = {
            "format": _FORMAT,
            "iteration": done,
            **{key: getattr(run.job, key) for key in _MUST_AGREE},
            **model_arguments(run.job.model),
            "cuts": [*self.cuts],
            **{
                key: whole[key]
                for key in ("parameters", "buffers", "masters", "loss", "scaler", "batch")
            },
            "optimizer": state.makers["optimizer"],
            "scheduler": {**state.makers["scheduler"], "state": whole["scheduler"]},
            "threads": self.threads,
            "torch": str(torch.__version__),
        }
        return {"model.pt": {name: whole["model"][name] for name in state.order}, "train.pt": train}

    def _restore(self, run: JobRun, at: int, place: Path) -> dict[str, Any]:
        """Load a checkpoint of a job into its model, optimizers and scheduler; its batch."""
        train = load(place / "train.pt")
        if not isinstance(train, dict) or train.get("format") != _FORMAT:
            raise InputError(f"{place / 'train.pt'}: is not a checkpoint of format {_FORMAT}")
        if train["iteration"] != at:
            raise InputError(
                f"{place}: was written after iteration {train['iteration']}; a folder must keep "
                f"its name"
            )
        for key in _MUST_AGREE:
            if train[key] != (now := getattr(run.job, key)):
                raise InputError(f"{place}: was written with {key} {train[key]}, the job has {now}")
        check_same_arguments(train, run.job.model, place)
        model = load(place / "model.pt")
        check_same_model(run.model, model, place / "model.pt")
        self._warn(train, place)
        made, title = self.jobs[run.index].makers, f"{place} of job {run.title}"
        check_same_scheduler(train["scheduler"], made["scheduler"], title)
        check_same_makers(train["optimizer"], made["optimizer"], title)
        restore(run, model, train, place)
        return dict(train["batch"])

    def _warn(self, train: Mapping[str, Any], place: Path) -> None:
        """What need not change the bits, but can."""
        if train["cuts"] != [*self.cuts]:
            warnings.warn(
                f"{place}: was written with stages cut at other modules; if the model draws random "
                f"numbers (dropout), they are others from here on: {train['cuts']}",
                stacklevel=2,
            )
        if train["threads"] != torch.get_num_threads():
            warnings.warn(
                f"{place}: was written with {train['threads']} threads, there are "
                f"{torch.get_num_threads()} now; the last bits may differ",
                stacklevel=2,
            )


@contextmanager
def _failing(run: JobRun, stage: int, iteration: int) -> Iterator[None]:
    """State that cannot be kept, found while the job trains, ends this job alone."""
    try:
        yield
    except NotKept as error:
        run.fail(stage, iteration, str(error))


class _Noted(NamedTuple):
    """The copy of a stage, and the event after it on a GPU."""

    shard: dict[str, dict[str, Any]]
    there: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the copy is there."""
        if self.there is not None:
            self.there.synchronize()


def _newest(place: Path) -> int:
    """The iteration that `latest` has; if that is not there, of the newest checkpoint that is."""
    pointer = place / "latest"
    if not pointer.exists():
        return max(numbered(place), default=0)
    text = read_text(pointer).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise InputError(
            f"{pointer}: expected the number of an iteration, got {text[:40]!r}; write that of "
            f"the checkpoint to go on from ({', '.join(map(str, numbered(place))) or 'none'})"
        )
    return int(text)


def _best(place: Path) -> tuple[int, float, bool]:
    """Iteration and value of the best checkpoint so far, whether higher ones are better; or 0."""
    try:
        done, value, *highest = read_text(place / "best").split()
        if (place / done).is_dir():
            return int(done), float(value), bool(highest)
    except (InputError, ValueError):
        pass
    return 0, math.inf, False
