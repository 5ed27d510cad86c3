"""Checkpoints per job, each at its own iteration boundary, complete or absent."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

import torch

from optsched.arraypipe.checkpoint.files import (
    INDEX,
    check_writable,
    damage,
    load,
    numbered,
    replace_file,
    stage_file,
    sweep,
    train_files,
    writing,
)
from optsched.arraypipe.checkpoint.plain import NotKept
from optsched.arraypipe.checkpoint.states import (
    check_keeps,
    check_restart,
    check_same,
    check_same_model,
    digest,
    restore,
    settings_of,
    stage_state,
)
from optsched.arraypipe.checkpoint.weights import (
    adapter_settings,
    open_weights,
    read_weights,
    write_configs,
    write_weights,
)
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InputError
from optsched.io.files import read_text, sync_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from optsched.arraypipe.job import Data
    from optsched.arraypipe.runtime.state import JobRun

_FORMAT: Final = "optsched.train/4"
_FROZEN: Final = ".frozen-"


@dataclass
class _JobState:
    """A job of this run."""

    settings: dict[str, str]  # of the fresh job; optimizers and schedulers change theirs
    kept: int  # newest iteration that is copied in this process
    batch: str = ""  # digest of the last one before the checkpoint that was read
    noted: dict[int, dict[int, _Noted]] = field(default_factory=dict)  # by iteration and stage
    pending: list[Future[None]] = field(default_factory=list)


@dataclass(eq=False)
class CheckpointFolder:
    """``<folder>/<job>/<iteration>/`` with files per stage, and ``<job>/best``.

    ``model-*.safetensors`` with ``model.safetensors.index.json`` are the weights under unsplit
    names, as `from_pretrained` reads them; ``frozen-*.safetensors`` those that several jobs have,
    written once and linked; ``train-*.pt`` everything else.

    A stage is copied right after its update, because it may begin the next iteration before the
    other stages have finished this one. Every process writes its stages into
    ``.parts-<iteration>``; the one that completes them gives the folder its name. Then older
    checkpoints are removed.

    A thread writes while the run continues. A job finishes its last checkpoint before the next
    one is written; errors of writing are raised then, or at the end of the run.
    """

    folder: Path  # on a file system that all processes share
    cuts: tuple[str, ...]  # blocks at which stages 1, 2, ... begin, noted in the checkpoint
    every: int | None  # write after every so many iterations; None: only after a job's last one
    keep: int = 2  # newest checkpoints of a job that are not removed; nor is the best one
    is_first: bool = True  # whether this process removes what a killed run has left
    stages_of: Callable[[JobRun], Collection[int]] | None = None  # trained here; None: all
    whole: bool = True  # batches are no parts for replicas, and are compared with former ones
    jobs: dict[int, _JobState] = field(default_factory=dict)
    checksums: dict[tuple[int, int, int], int] = field(default_factory=dict)  # of files read

    def __post_init__(self) -> None:
        self.writer = ThreadPoolExecutor(1, "optsched-checkpoint")
        self.parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.prepared = False
        self.frozen: dict[tuple[str, ...], tuple[Path, int]] = {}  # files to link, checksums

    def prepare(self, titles: Iterable[str], resume: bool) -> None:
        """Make the folders; refuse one that cannot be written, or that has another run in it."""
        if self.is_first and not self.prepared:  # a job that joins later links them
            for file in self.folder.glob(f"{_FROZEN}*"):
                file.unlink(missing_ok=True)
        self.prepared = True
        for title in titles:
            place = self.folder / title
            check_writable(place)
            if not resume:
                self.check_unused(title)
            if not self.is_first:
                continue
            with writing(place):
                sweep(place)
                self._tidy(place)

    def check_unused(self, title: str) -> None:
        """Refuse a job that has checkpoints already."""
        place = self.folder / title
        if numbered(place):
            raise InputError(
                f"checkpoint: {place} already has checkpoints; choose another folder, or "
                f"resume=True to go on from them"
            )

    def newest(self, title: str) -> int:
        """Return iteration of the newest checkpoint of a job, 0 if it has none."""
        return max(numbered(self.folder / title), default=0)

    def latest(self, title: str) -> int:
        """Return the newest checkpoint of a job, all of which is read; a damaged one is refused."""
        place, done = self.folder / title, self.newest(title)
        reason = damage(place / str(done), self.checksums) if done else ""
        if not reason:
            return done
        older = (at for at in reversed(numbered(place)[:-1]))
        whole = next((at for at in older if not damage(place / str(at), self.checksums)), 0)
        raise InputError(
            f"{place / str(done)}: {reason}"
            + (
                f"; iteration {whole} is complete: remove the newer folders to go on from it"
                if whole
                else ", and there is no older checkpoint; restore it from a copy, or train in "
                "another folder"
            )
        )

    def begin(self, run: JobRun, at: int) -> str:
        """Add a job with fresh stages, and restore its checkpoint of iteration `at`, if > 0."""
        try:
            self.jobs[run.index] = _JobState(settings_of(run), at)
            check_keeps(run)
        except NotKept as error:
            self.jobs[run.index] = _JobState({}, at)
            return str(error)
        if at:
            self._restore(run, at, self.folder / run.title / str(at))
        self.parameters.update((id(p), p) for p in run.model.parameters())
        return ""

    def watched(self, run: JobRun, data: Data) -> Data:
        """The data of a job, which must begin with the batch of the iteration to resume with."""
        at = self.jobs[run.index].kept
        if at:
            known = self.jobs[run.index].batch if self.whole else ""
            check_restart(data, run.job, run.title, at, known)
        return data

    def note(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage that has just finished an iteration, if that iteration is to be kept."""
        done = iteration + 1
        if done == run.end or (self.every is not None and done % self.every == 0):
            with _failing(run, stage, iteration):
                self._take(run, stage, done)

    def mark_best(self, run: JobRun, done: int, value: float, highest: bool = False) -> None:
        """Note how good a job is after so many iterations; its lowest value is never removed."""
        self._submit(run, partial(self._mark, self.folder / run.title, done, float(value), highest))

    def mark_now(self, title: str, done: int, value: float, highest: bool) -> None:
        """Note a value on the first rank; the ranks that write remove what it replaces."""
        self._mark(self.folder / title, done, float(value), highest, tidy=False)

    def finish(self, run: JobRun) -> None:
        """After the run: write the last iteration of a job if that is not done yet."""
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
        for file, _ in self.frozen.values():
            file.unlink(missing_ok=True)  # checkpoints have links

    def settle(self, job: int) -> None:
        """Wait until all that a job has given to be written is there, from this process."""
        pending, self.jobs[job].pending = self.jobs[job].pending, []
        for future in pending:
            future.result()

    def _here(self, run: JobRun) -> Collection[int]:
        return range(len(self.cuts) + 1) if self.stages_of is None else self.stages_of(run)

    def _submit(self, run: JobRun, write: Callable[[], None]) -> None:
        def written() -> None:
            with writing(self.folder / run.title):
                write()

        self.jobs[run.index].pending.append(self.writer.submit(written))

    def _take(self, run: JobRun, stage: int, done: int) -> None:
        """Copy a stage; with the last one of this process, let the thread write all of them."""
        state, device = self.jobs[run.index], run.stages[stage].device
        copies = stage_state(run, stage)
        if not stage and self.whole and run.feed is not None and run.feed.iteration == done - 1:
            copies["batch"] = {"digest": digest(run.feed.parts)}
        copied = torch.cuda.current_stream(device).record_event() if on_gpu(device) else None
        noted = state.noted.setdefault(done, {})
        noted[stage] = _Noted(copies, copied)
        if len(noted) == len(self._here(run)):
            state.kept = done
            self.settle(run.index)  # one checkpoint of a job at a time, as they take memory
            self._submit(run, partial(self._write, run, done, state.noted.pop(done)))

    def _write(self, run: JobRun, done: int, noted: Mapping[int, _Noted]) -> None:
        """Write stages; if no other process has some to write, complete the checkpoint."""
        place, n_stages = self.folder / run.title, len(run.stages)
        parts, merging = place / f".parts-{done}", place / f".merging-{done}"
        parts.mkdir(exist_ok=True)
        for stage, row in noted.items():
            row.wait()
            self._write_stage(run, parts, stage, done, row.state)
        try:
            if len(train_files(parts)) < n_stages:
                return
            parts.rename(merging)
        except FileNotFoundError:  # another process completes it
            return
        places, total = {}, 0
        for path in sorted(merging.glob("*.safetensors")):
            places.update(dict.fromkeys(open_weights(path).shapes, path.name))
            total += path.stat().st_size
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
        replace_file(merging / INDEX, json.dumps(index, indent=1))
        if sums := write_configs(run.model, merging):
            index["metadata"]["checksums"] = sums
            replace_file(merging / INDEX, json.dumps(index, indent=1))
        target = place / str(done)
        sync_folder(merging)
        merging.rename(target)
        sync_folder(place)
        self._tidy(place)

    def _write_stage(
        self, run: JobRun, parts: Path, stage: int, done: int, state: Mapping[str, Any]
    ) -> None:
        """Write the files of one stage; its train file is last."""
        n_stages, checksums = len(run.stages), {}
        if state["model"] or not state["frozen"]:
            name = stage_file("model", stage, n_stages)
            checksums[name] = write_weights(parts / name, state["model"])
        if state["frozen"]:
            name = stage_file("frozen", stage, n_stages)
            checksums[name] = self._link_frozen(parts / name, state["frozen"])
        train = {
            "format": _FORMAT,
            "iteration": done,
            "settings": self.jobs[run.index].settings,
            "cuts": [*self.cuts],
            "checksums": checksums,
            **{key: value for key, value in state.items() if key not in ("model", "frozen")},
        }
        replace_file(parts / stage_file("train", stage, n_stages), train)

    def _link_frozen(self, path: Path, tensors: Mapping[str, Tensor]) -> int:
        """Link the file of tensors that never change, which is written once; its checksum."""
        key = tuple(f"{name} {t.data_ptr()}" for name, t in tensors.items())
        if key not in self.frozen:
            file = self.folder / f"{_FROZEN}{uuid4().hex}.safetensors"
            self.frozen[key] = file, write_weights(file, tensors)
        file, checksum = self.frozen[key]
        try:
            path.hardlink_to(file)
        except OSError:  # a file system without links
            shutil.copyfile(file, path)
        return checksum

    def _mark(self, place: Path, done: int, value: float, highest: bool, tidy: bool = True) -> None:
        best = _best(place)
        better = best is None or (value > best[1] if highest else value < best[1])
        if better and not math.isnan(value) and done in numbered(place):
            replace_file(place / "best", f"{done} {value!r}\n")
            if done not in numbered(place):  # another rank removed it meanwhile
                if best is None:
                    (place / "best").unlink()
                else:
                    replace_file(place / "best", f"{best[0]} {best[1]!r}\n")
            if tidy:
                self._tidy(place)

    def _tidy(self, place: Path) -> None:
        """Remove the checkpoints that are neither the best nor among the newest."""
        best = _best(place)
        for done in numbered(place)[: -self.keep]:
            if best is None or done != best[0]:  # its name goes at once
                old = (place / str(done)).rename(place / f".tmp-old-{done}")
                marked = (place / "best").exists() and read_text(place / "best").split()
                if marked and marked[0] == str(done):  # by another rank meanwhile
                    old.rename(place / str(done))
                else:
                    shutil.rmtree(old)

    def read(self, title: str, done: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole state dict in a checkpoint, and the buffers that it leaves out."""
        place = self.folder / title / str(done)
        train = _read_train(place)
        return {**read_weights(place), **train["extra"]}, train["buffers"]

    def _restore(self, run: JobRun, at: int, place: Path) -> None:
        """Load a checkpoint of a job into its stages that have tensors in this process."""
        train = _read_train(place)
        if train["iteration"] != at:
            raise InputError(
                f"{place}: was written after iteration {train['iteration']}; a folder must keep "
                f"its name"
            )
        self.jobs[run.index].batch = train.get("batch", {}).get("digest", "")
        weights = open_weights(place)
        check_same_model(run, weights, train["extra"].keys(), place)
        check_same(train["settings"], self.jobs[run.index].settings, "{}", place)
        adapters: Any = getattr(run.model, "peft_config", None)
        file = place / "adapter_config.json"
        if isinstance(adapters, dict) and len(adapters) == 1 and file.exists():
            (adapter,) = adapters.values()
            before = adapter_settings(json.loads(read_text(file)))
            now = adapter_settings(adapter.to_dict())
            both = before.keys() & now.keys()  # another release of PEFT may have other settings
            before, now = ({key: row[key] for key in sorted(both)} for row in (before, now))
            check_same(before, now, "adapter setting {}", place)
        if train["cuts"] != [*self.cuts]:
            warnings.warn(
                f"{place}: was written with stages cut at other modules; if the model draws random "
                f"numbers (dropout), they are others from here on: {train['cuts']}",
                stacklevel=2,
            )
        shared = {p.data_ptr() for p in run.model.parameters() if id(p) in self.parameters}
        here = [stage for stage in run.stages if stage.local]
        restore(run, here, weights, train, shared, place)


@contextmanager
def _failing(run: JobRun, stage: int, iteration: int) -> Iterator[None]:
    """State that cannot be kept, found while the job trains, ends this job alone."""
    try:
        yield
    except NotKept as error:
        run.fail(stage, iteration, str(error))


class _Noted(NamedTuple):
    """The copy of a stage, and the event after it on a GPU."""

    state: dict[str, dict[str, Any]]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()


def _read_train(place: Path) -> dict[str, Any]:
    """Return the train files of a checkpoint as one; tensors are read when they are used."""
    train: dict[str, Any] = {}
    for path in train_files(place):
        part = load(path, mmap=True)
        if not isinstance(part, dict) or part.get("format") != _FORMAT:
            raise InputError(f"{path}: is not a checkpoint of format {_FORMAT}")
        for key, value in part.items():
            if key in ("parameters", "masters", "buffers", "extra", "loss"):
                train.setdefault(key, {}).update(value)
            elif not train.get(key):
                train[key] = value
    return train


def _best(place: Path) -> tuple[int, float] | None:
    """Return iteration and value of the best checkpoint so far."""
    try:
        done, value = read_text(place / "best").split()
        return (int(done), float(value)) if (place / done).is_dir() else None
    except (InputError, ValueError):
        return None
