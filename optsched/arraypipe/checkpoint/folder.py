"""Checkpoints per job, each at its own iteration boundary, whole or not at all."""

from __future__ import annotations

import math
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from optsched.arraypipe.checkpoint.batches import Seen, watched
from optsched.arraypipe.checkpoint.files import (
    check_plain,
    check_writable,
    damage,
    load,
    make_folder,
    numbered,
    remove,
    replace_file,
    sweep,
    write_folder,
)
from optsched.arraypipe.checkpoint.states import (
    check_same_arguments,
    check_same_model,
    check_same_scheduler,
    joined,
    makers,
    model_arguments,
    restore,
    shard_of,
)
from optsched.arraypipe.model.optimizers import check_same_makers
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InputError
from optsched.io.files import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from optsched.arraypipe.job import Data
    from optsched.arraypipe.model.split import Names
    from optsched.arraypipe.runtime.state import JobRun


_FORMAT: Final = "optsched.train/3"
_DIGITS: Final = 18  # of an iteration
_MUST_AGREE: Final = ("seed", "batch_size", "microbatches", "precision", "clip_norm")


@dataclass
class _JobState:
    """What the folder knows of a job of this run."""

    makers: dict[str, Any]  # what its optimizers and scheduler were made with
    arguments: dict[str, Any]  # those of `Job.model` that are plain
    order: list[str]  # of the entries of its state dict
    kept: int  # newest iteration whose stages of this process are copied
    seen: Seen  # its newest batch
    noted: dict[int, dict[int, _Noted]] = field(default_factory=dict)  # copies: iteration, stage
    writing: int = 0  # iteration that the thread was last given
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
    names: Names  # modules of every stage, noted in the checkpoint
    every: int | None  # write after every so many iterations; None: only after a job's last one
    keep: int = 2  # newest checkpoints of a job that are not removed; nor is the best one
    is_first: bool = True  # of the processes: it tidies up, and no other may write before
    stages_of: Callable[[JobRun], Collection[int]] | None = None  # trained here; None: all
    jobs: dict[int, _JobState] = field(default_factory=dict)
    fallen_back: dict[str, tuple[int, int]] = field(default_factory=dict)  # by title: from, to
    writer: ThreadPoolExecutor | None = None
    threads: int = field(default_factory=torch.get_num_threads)

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
            if title in self.fallen_back:
                newest, at = self.fallen_back.pop(title)
                if (place / str(newest)).exists():
                    (place / str(newest)).replace(place / f"{newest}.damaged")
                replace_file(place / "latest", f"{at}\n")
            self._tidy(place)
            sweep(place)

    def check_unused(self, title: str) -> None:
        """Refuse a job that has checkpoints already."""
        place = self.folder / title
        if (place / "latest").exists():
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
        if newest == 0:
            return 0
        reason = damage(place / str(newest))
        if not reason:
            return newest
        for at in reversed(numbered(place)):
            if at < newest and not damage(place / str(at)):
                warnings.warn(
                    f"{place / str(newest)}: {reason}; job {title} goes on from iteration {at}, "
                    f"and what is left of iteration {newest} becomes {newest}.damaged",
                    stacklevel=2,
                )
                self.fallen_back[title] = (newest, at)
                return at
        raise InputError(
            f"{place / str(newest)}: {reason}, and there is no older checkpoint; remove {place} to "
            f"train the job from its seed"
        )

    def begin(self, run: JobRun, at: int) -> int:
        """Take in a job with fresh stages, and go on from its checkpoint of iteration `at`, if > 0.

        Notes what the optimizers and schedulers were made with; some change their own settings
        while they train. Returns `at`.
        """
        state = self.jobs[run.index] = _JobState(
            makers(run), model_arguments(run.job.model), list(run.model.state_dict()), at,
            Seen(at, run.title),
        )  # fmt: skip
        if at > 0:
            place = self.folder / run.title / str(at)
            try:
                state.seen.expected = self._restore(run, at, place)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, (InputError, torch.OutOfMemoryError)):
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise InputError(f"{place}: is damaged, or no checkpoint ({reason})") from error
        return at

    def watched(self, run: JobRun, data: Data) -> Data:
        """The data of a job, compared with those that its checkpoint was trained on."""
        seen = self.jobs[run.index].seen
        return watched(data, seen, lambda: 0 in self._here(run))

    def note(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage that has just finished an iteration, if that iteration is to be kept."""
        if self._is_due(run, iteration + 1):
            self._take(run, stage, iteration + 1)

    def mark_best(self, run: JobRun, done: int, value: float) -> None:
        """Note how good a job is after so many iterations; its lowest value is never removed.

        Called in one process, always the same, and before `keep` newer checkpoints are written. An
        iteration that has no checkpoint, and a value that is no number, are passed over.
        """
        if self._is_due(run, done) and not math.isnan(value):
            self._submit(run, partial(self._mark, run, done, float(value)))

    def finish(self, run: JobRun) -> None:
        """After the run: write the last iteration of a job if that is not done yet.

        Some stages may have finished it before it was known to be the last. A job that has failed
        keeps its earlier checkpoints.
        """
        state = self.jobs[run.index]
        done = min(run.begin, run.end)  # other processes run tombstones to the end of a segment
        if run.job.status != "failed" and done > max(run.start, state.kept):
            for stage in self._here(run):
                if stage not in state.noted.get(done, ()):
                    self._take(run, stage, done)
        state.noted.clear()
        self.settle(run.index)

    def close(self) -> None:
        """Wait until all is written; what that raises has been raised by `finish`."""
        if self.writer is not None:
            self.writer.shutdown()
            self.writer = None

    def settle(self, job: int) -> None:
        """Wait until all that a job has given to be written is there, from this process."""
        given, self.jobs[job].given = self.jobs[job].given, []
        for future in given:
            future.result()

    def _here(self, run: JobRun) -> Collection[int]:
        return range(len(self.names)) if self.stages_of is None else self.stages_of(run)

    def _is_due(self, run: JobRun, done: int) -> bool:
        return done == run.end or (self.every is not None and done % self.every == 0)

    def _submit(self, run: JobRun, write: Callable[[], None]) -> None:
        self.writer = self.writer or ThreadPoolExecutor(1, "optsched-checkpoint")
        self.jobs[run.index].given.append(self.writer.submit(write))

    def _give(self, run: JobRun, done: int, write: Callable[[], None]) -> None:
        """Have the thread write; one checkpoint of a job at a time, as they take memory."""
        state = self.jobs[run.index]
        if state.given and state.writing != done:
            self.settle(run.index)
        state.writing = done
        self._submit(run, write)

    def _take(self, run: JobRun, stage: int, done: int) -> None:
        state = self.jobs[run.index]
        shards = state.noted.setdefault(done, {})
        shard, device = shard_of(run, stage), run.stages[stage].device
        shard["batch"] = state.seen.batch(done - 1) if stage == 0 else {}
        there = torch.cuda.current_stream(device).record_event() if on_gpu(device) else None
        here = self._here(run)
        alone = len(here) == len(self.names)
        if alone:
            shards[stage] = _Noted(shard, there)
        else:
            check_plain(shard, f"checkpoint of job {run.title}")
            self._give(run, done, partial(self._write_part, run, stage, done, _Noted(shard, there)))
            shards[stage] = _Noted({}, None)  # only that it is noted
        if len(shards) < len(here):
            return
        state.kept = done
        del state.noted[done]
        if alone:
            noted = [shards[s] for s in sorted(shards)]
            files = self._files(run, done, [row.shard for row in noted])
            place = self.folder / run.title
            self._give(run, done, partial(self._write_alone, place, done, files, noted))

    def _write_alone(
        self, place: Path, done: int, files: Mapping[str, Any], noted: Iterable[_Noted]
    ) -> None:
        for row in noted:
            row.wait()
        _write(place, done, files)
        self._tidy(place)

    def _write_part(self, run: JobRun, stage: int, done: int, noted: _Noted) -> None:
        """Leave a stage where all processes find it; write every job whose stages are all there."""
        noted.wait()
        place = self.folder / run.title
        parts = place / f".parts-{done}"
        make_folder(parts)
        replace_file(parts / _part(stage), noted.shard)
        self._attend(run, place)

    def _mark(self, run: JobRun, done: int, value: float) -> None:
        """Leave a value where the process that writes the checkpoint finds it."""
        place = self.folder / run.title
        replace_file(place / f".value-{done}", repr(value))
        self._attend(run, place)

    def _attend(self, run: JobRun, place: Path) -> None:
        """Write what is complete, and look at the values of what is written."""
        # who makes this folder does so; the others leave, because it looks again after removing it
        claim = place / ".merging"
        while (complete := self._complete(place)) or _values(place):
            try:
                claim.mkdir()
            except FileExistsError:
                return
            except OSError:
                check_writable(place)  # says so
                raise
            try:
                for t in complete:
                    self._merge(run, t)
                self._tidy(place)
            finally:
                claim.rmdir()

    def _complete(self, place: Path) -> list[int]:
        """Iterations of which the parts of all stages are there, ascending."""
        wanted = {_part(stage) for stage in range(len(self.names))}
        found = []
        for parts in place.glob(".parts-*"):
            try:
                there = {entry.name for entry in parts.iterdir()}
            except FileNotFoundError:  # another process has just removed it
                continue
            if wanted <= there:
                found.append(int(parts.name.removeprefix(".parts-")))
        return sorted(found)

    def _merge(self, run: JobRun, done: int) -> None:
        place = self.folder / run.title
        parts = place / f".parts-{done}"
        if not parts.exists():  # written by another process since we looked
            return
        shards = [load(parts / _part(s)) for s in range(len(self.names))]
        _write(place, done, self._files(run, done, shards))
        shutil.rmtree(parts)

    def _tidy(self, place: Path) -> None:
        """Note the best checkpoint; remove those that are neither that nor among the newest."""
        newest = _newest(place)
        there = [done for done in numbered(place) if done <= newest]
        best, lowest = _best(place)
        for done in _values(place):
            noted = place / f".value-{done}"
            value = float(read_text(noted))
            if done in there and value < lowest:
                best, lowest = done, value
                replace_file(place / "best", f"{best} {lowest!r}\n")
            noted.unlink()
        for done in there[: -self.keep]:
            if done != best:
                remove(place / str(done))

    def _files(
        self, run: JobRun, done: int, shards: Iterable[Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What a checkpoint consists of, by the names of its files; no tensor is read."""
        state = self.jobs[run.index]
        whole = joined(shards, run.title)
        train = {
            "format": _FORMAT,
            "iteration": done,
            **{key: getattr(run.job, key) for key in _MUST_AGREE},
            **state.arguments,
            "stages": [list(row) for row in self.names],
            **{key: whole[key] for key in ("parameters", "buffers", "masters", "batch")},
            "optimizer": state.makers["optimizer"],
            "scheduler": {**state.makers["scheduler"], "state": whole["scheduler"]},
            "threads": self.threads,
            "torch": str(torch.__version__),
        }
        check_plain(train, f"checkpoint of job {run.title}")
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
            if train[key] != getattr(run.job, key):
                raise InputError(
                    f"{place}: was written with {key} {train[key]}, the job has "
                    f"{getattr(run.job, key)}"
                )
        check_same_arguments(train, run.job.model, place)
        model = load(place / "model.pt")
        check_same_model(run.model, model, place / "model.pt")
        self._warn(train, place)
        now, title = self.jobs[run.index].makers, f"{place} of job {run.title}"
        check_same_scheduler(train["scheduler"], now["scheduler"], title)
        check_same_makers(train["optimizer"], now["optimizer"], title)
        restore(run, model, train, place)
        return dict(train["batch"])

    def _warn(self, train: Mapping[str, Any], place: Path) -> None:
        """What need not change the bits, but can."""
        if train["stages"] != [list(row) for row in self.names]:
            warnings.warn(
                f"{place}: was written with stages cut at other modules; if the model draws random "
                f"numbers (dropout), they are others from here on: {train['stages']}",
                stacklevel=2,
            )
        if train["threads"] != torch.get_num_threads():
            warnings.warn(
                f"{place}: was written with {train['threads']} threads, there are "
                f"{torch.get_num_threads()} now; the last bits may differ",
                stacklevel=2,
            )


class _Noted(NamedTuple):
    """The copy of a stage, and the event after it on a GPU."""

    shard: dict[str, dict[str, Any]]
    there: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the copy is there."""
        if self.there is not None:
            self.there.synchronize()


def _part(stage: int) -> str:
    return f"stage{stage}.pt"


def _write(place: Path, done: int, files: Mapping[str, Any]) -> None:
    write_folder(place / str(done), files)
    replace_file(place / "latest", f"{done}\n")


def _newest(place: Path) -> int:
    """The iteration that `latest` has, 0 if it is not there."""
    pointer = place / "latest"
    if not pointer.exists():
        return 0
    text = read_text(pointer).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise InputError(f"{pointer}: expected the number of an iteration, got {text[:40]!r}")
    return int(text)


def _best(place: Path) -> tuple[int, float]:
    """Iteration and value of the best checkpoint so far; (0, infinity) if there is none."""
    try:
        done, value = read_text(place / "best").split()
        return (int(done), float(value)) if (place / done).is_dir() else (0, math.inf)
    except (InputError, ValueError):
        return 0, math.inf


def _values(place: Path) -> list[int]:
    """Iterations with a value of which it is known whether they have a checkpoint."""
    noted = [int(entry.name.removeprefix(".value-")) for entry in place.glob(".value-*")]
    return sorted(done for done in noted if done <= _newest(place)) if noted else []
