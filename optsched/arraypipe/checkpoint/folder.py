"""Checkpoints per job, each at its own iteration boundary, whole or not at all."""

from __future__ import annotations

import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from optsched.arraypipe.checkpoint.files import (
    check_plain,
    check_writable,
    load,
    make_folder,
    replace_file,
    sweep,
    write_folder,
)
from optsched.arraypipe.checkpoint.states import (
    check_same_arguments,
    check_same_class,
    check_same_model,
    check_same_settings,
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
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping
    from concurrent.futures import Future

    from optsched.arraypipe.model.split import Names
    from optsched.arraypipe.runtime.state import JobRun


_FORMAT: Final = "optsched.train/2"
_DIGITS: Final = 18  # of an iteration
_MUST_AGREE: Final = ("seed", "batch_size", "microbatches", "precision", "clip_norm")


class CheckpointFolder:
    """``<folder>/<job>/<iteration>/{model.pt,train.pt}`` and ``<folder>/<job>/latest``.

    A stage is copied right after its update, because it may begin the next iteration before the
    other stages have finished this one; when the last stage is in, the job is written. Where
    several processes hold the stages, each writes its own into ``.parts-<iteration>``, and the one
    that completes them writes the job.

    A thread writes while the run goes on. A job waits for its last checkpoint before it gives the
    next one to be written; what writing raises is raised then, or at the end of the run.

    Parameters
    ----------
    folder
        Made if it is not there; on a file system that all processes share.
    names
        Modules of every stage, noted in the checkpoint.
    every
        Write after every so many iterations; None: only after the last one of a job.
    """

    def __init__(self, folder: str | os.PathLike[str], names: Names, every: int | None) -> None:
        self.folder, self.names, self.every = Path(folder), names, every
        self.stages_of: Callable[[JobRun], Collection[int]] = lambda run: range(len(names))
        self.is_first = True
        self.noted: dict[tuple[int, int], dict[int, _Noted]] = {}
        self.makers: dict[int, dict[str, Any]] = {}
        self.arguments: dict[int, dict[str, Any]] = {}
        self.order: dict[int, list[str]] = {}
        self.kept: dict[int, int] = {}  # newest iteration whose stages of this process are noted
        self.writer: ThreadPoolExecutor | None = None
        self.writing: dict[int, tuple[int, list[Future[None]]]] = {}  # by job: iteration, its files
        self.threads = torch.get_num_threads()

    def share(self, stages_of: Callable[[JobRun], Collection[int]], is_first: bool) -> None:
        """Several processes train the stages of a job, and write to this folder.

        Parameters
        ----------
        stages_of
            Those that are trained here, as long as the job runs.
        is_first
            True in one of the processes: it tidies up in `prepare`, and no other may write before.
        """
        self.stages_of, self.is_first = stages_of, is_first

    def prepare(self, titles: Iterable[str], resume: bool) -> None:
        """Make the folders; refuse one that cannot be written, or that has another run in it.

        What a killed run has left half done is removed.
        """
        for title in titles:
            place = self.folder / title
            check_writable(place)
            if not resume and (place / "latest").exists():
                raise InputError(
                    f"checkpoint: {place} already has checkpoints; choose another folder, or "
                    f"resume=True to go on from them"
                )
            if self.is_first:
                sweep(place)

    def latest(self, title: str) -> int:
        """Iteration of the newest checkpoint of a job, 0 if there is none.

        In a run of several processes one asks, and tells the others.
        """
        pointer = self.folder / title / "latest"
        if not pointer.exists():
            return 0
        text = read_text(pointer).strip()
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise InputError(f"{pointer}: expected the number of an iteration, got {text[:40]!r}")
        return int(text)

    def begin(self, run: JobRun, at: int) -> int:
        """Take in a job with fresh stages, and go on from its checkpoint of iteration `at`, if > 0.

        Notes what the optimizers and schedulers were made with; some change their own settings
        while they train. Returns `at`.
        """
        self.makers[run.index] = makers(run)
        self.arguments[run.index] = model_arguments(run.job.model)
        self.order[run.index] = list(run.model.state_dict())
        if at > 0:
            place = self.folder / run.title / str(at)
            try:
                self._restore(run, at, place)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, (InputError, torch.OutOfMemoryError)):
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise InputError(f"{place}: is damaged, or no checkpoint ({reason})") from error
        self.kept[run.index] = at
        return at

    def note(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage that has just finished an iteration, if that iteration is to be kept."""
        done = iteration + 1
        if done == run.end or (self.every is not None and done % self.every == 0):
            self._take(run, stage, done)

    def finish(self, run: JobRun) -> None:
        """After the run: write the last iteration of a job if that is not done yet.

        Some stages may have finished it before it was known to be the last. A job that has failed
        keeps its earlier checkpoints.
        """
        done = min(run.begin, run.end)  # other processes run tombstones to the end of a segment
        if run.job.status != "failed" and done > max(run.start, self.kept[run.index]):
            for stage in self.stages_of(run):
                if stage not in self.noted.get((run.index, done), ()):
                    self._take(run, stage, done)
        for key in [key for key in self.noted if key[0] == run.index]:
            del self.noted[key]
        self.settle(run.index)

    def close(self) -> None:
        """Wait until all is written; what that raises has been raised by `finish`."""
        if self.writer is not None:
            self.writer.shutdown()
            self.writer = None

    def settle(self, job: int) -> None:
        """Wait until all that a job has given to be written is there, from this process."""
        _, given = self.writing.pop(job, (0, []))
        for future in given:
            future.result()

    def _give(self, run: JobRun, done: int, write: Callable[[], None]) -> None:
        """Have the thread write; one checkpoint of a job at a time, as they take memory."""
        if self.writing.get(run.index, (done, []))[0] != done:
            self.settle(run.index)
        self.writer = self.writer or ThreadPoolExecutor(1, "optsched-checkpoint")
        given = self.writing.setdefault(run.index, (done, []))[1]
        given.append(self.writer.submit(write))

    def _take(self, run: JobRun, stage: int, done: int) -> None:
        shards = self.noted.setdefault((run.index, done), {})
        shard, device = shard_of(run, stage), run.stages[stage].device
        there = torch.cuda.current_stream(device).record_event() if on_gpu(device) else None
        here = self.stages_of(run)
        alone = len(here) == len(self.names)
        if alone:
            shards[stage] = _Noted(shard, there)
        else:
            check_plain(shard, f"checkpoint of job {run.title}")
            self._give(run, done, partial(self._write_part, run, stage, done, _Noted(shard, there)))
            shards[stage] = _Noted({}, None)  # only that it is noted
        if len(shards) < len(here):
            return
        self.kept[run.index] = done
        del self.noted[run.index, done]
        if alone:
            noted = [shards[s] for s in sorted(shards)]
            files = self._files(run, done, [row.shard for row in noted])
            self._give(run, done, partial(self._write, run.title, done, files, noted))

    def _write_part(self, run: JobRun, stage: int, done: int, noted: _Noted) -> None:
        """Leave a stage where all processes find it; write every job whose stages are all there."""
        noted.wait()
        place = self.folder / run.title
        parts = place / f".parts-{done}"
        make_folder(parts)
        replace_file(parts / _part(stage), noted.shard)
        # who makes this folder writes; the others leave, because it looks again after removing it
        claim = place / ".merging"
        while complete := self._complete(place):
            try:
                claim.mkdir()
            except FileExistsError:
                return
            try:
                for t in complete:
                    self._merge(run, t)
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
        parts = self.folder / run.title / f".parts-{done}"
        if not parts.exists():  # written by another process since we looked
            return
        shards = [load(parts / _part(s)) for s in range(len(self.names))]
        self._write(run.title, done, self._files(run, done, shards))
        shutil.rmtree(parts)

    def _files(
        self, run: JobRun, done: int, shards: Iterable[Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What a checkpoint consists of, by the names of its files; no tensor is read."""
        whole = joined(shards)
        model = {name: whole["model"][name] for name in self.order[run.index]}
        train = {
            "format": _FORMAT,
            "iteration": done,
            **{key: getattr(run.job, key) for key in _MUST_AGREE},
            **self.arguments[run.index],
            "stages": [list(row) for row in self.names],
            **{key: whole[key] for key in ("parameters", "buffers", "masters", "schedulers")},
            **self.makers[run.index],
            "threads": self.threads,
            "torch": str(torch.__version__),
        }
        check_plain(train, f"checkpoint of job {run.title}")
        return {"model.pt": model, "train.pt": train}

    def _write(
        self, title: str, done: int, files: Mapping[str, Any], noted: Iterable[_Noted] = ()
    ) -> None:
        for row in noted:
            row.wait()
        place = self.folder / title
        write_folder(place / str(done), files)
        replace_file(place / "latest", f"{done}\n")

    def _restore(self, run: JobRun, at: int, place: Path) -> None:
        """Load a checkpoint of a job into its model, optimizers and schedulers."""
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
        now, title = self.makers[run.index], f"{place} of job {run.title}"
        check_same_class(train["scheduler"], now["scheduler"], title)
        check_same_makers(train["optimizer"], now["optimizer"], title)
        check_same_settings(train["scheduler"], now["scheduler"], title)
        restore(run, model, train, place)

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
