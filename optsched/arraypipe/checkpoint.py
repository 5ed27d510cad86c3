"""Checkpoints per job, each at its own iteration boundary, whole or not at all."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.optimizers import (
    check_same_makers,
    makers_by_name,
    restore_states,
    states_by_name,
)
from optsched.errors import InputError
from optsched.files import read_text, write_atomic

if TYPE_CHECKING:
    from optsched.arraypipe.inline import JobRun
    from optsched.arraypipe.split import Names

_FORMAT: Final = "optsched.train/1"
_MUST_AGREE: Final = ("seed", "batch_size", "microbatches")


class CheckpointFolder:
    """``<folder>/<job>/<iteration>/{model.pt,train.pt}`` and ``<folder>/<job>/latest``.

    A stage is copied right after its update, because it may begin the next iteration before the
    other stages have finished this one; when the last stage is in, the job is written.

    Parameters
    ----------
    folder
        Made if it is not there.
    names
        Modules of every stage, noted in the checkpoint.
    every, steps
        Write after every so many iterations (None: only at the end), and after the last.
    """

    def __init__(
        self, folder: str | os.PathLike[str], names: Names, every: int | None, steps: int
    ) -> None:
        self.folder, self.names, self.every, self.steps = Path(folder), names, every, steps
        self.shards: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.makers: dict[int, dict[str, dict[str, Any]]] = {}

    def prepare(self, titles: list[str], resume: bool) -> None:
        """Make the folders; refuse one that cannot be written, or that has another run in it."""
        for title in titles:
            place = self.folder / title
            try:
                place.mkdir(parents=True, exist_ok=True)
                os.rmdir(tempfile.mkdtemp(prefix=".tmp-", dir=place))
            except OSError as error:
                raise InputError(
                    f"checkpoint: {place} cannot be written ({error.strerror or error})"
                ) from None
            if not resume and (place / "latest").exists():
                raise InputError(
                    f"checkpoint: {place} already has checkpoints; choose another folder, or "
                    f"resume=True to go on from them"
                )

    def note(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage that has just finished an iteration, if that iteration is to be kept."""
        done = iteration + 1
        if done != self.steps and (self.every is None or done % self.every):
            return
        shards = self.shards.setdefault((run.index, done), [])
        shards.append(_shard(run, stage))
        if len(shards) == len(run.stages):
            self._write(run, done, self.shards.pop((run.index, done)))

    def begin(self, run: JobRun, resume: bool) -> int:
        """Note what the fresh optimizers of a job were made with; the iteration to go on from."""
        self.makers[run.index] = makers_by_name(
            [stage.optimizer for stage in run.stages], [stage.parameters for stage in run.stages]
        )
        return self._restore(run) if resume else 0

    def _restore(self, run: JobRun) -> int:
        """Load the latest checkpoint of a job into its model and optimizers; its iteration or 0."""
        pointer = self.folder / run.title / "latest"
        if not pointer.exists():
            return 0
        text = read_text(pointer).strip()
        if not text.isdecimal():
            raise InputError(f"{pointer}: expected the number of an iteration, got {text[:40]!r}")
        place = self.folder / run.title / text
        train = _load(place / "train.pt")
        if not isinstance(train, dict) or train.get("format") != _FORMAT:
            raise InputError(f"{place / 'train.pt'}: is not a checkpoint of format {_FORMAT}")
        for key in _MUST_AGREE:
            if train[key] != getattr(run.job, key):
                raise InputError(
                    f"{place}: was written with {key} {train[key]}, the job has "
                    f"{getattr(run.job, key)}"
                )
        if train["stages"] != [list(row) for row in self.names]:
            raise InputError(
                f"{place}: was written with stages cut at other modules, so the random numbers "
                f"would differ: {train['stages']}"
            )
        if train["threads"] != torch.get_num_threads():
            warnings.warn(
                f"{place}: was written with {train['threads']} threads, there are "
                f"{torch.get_num_threads()} now; the last bits may differ",
                stacklevel=2,
            )
        _restore_model(run.model, _load(place / "model.pt"), place / "model.pt")
        for name, value in train["buffers"].items():
            _set_buffer(run.model, name, value, place / "train.pt")
        # a file without the field tells the settings by the states alone
        made = train["optimizer" if "optimizer" in train else "parameters"]
        check_same_makers(made, self.makers[run.index], f"{place} of job {run.title}")
        for stage in run.stages:
            restore_states(stage.optimizer, stage.parameters, train["parameters"], str(place))
        return int(train["iteration"])

    def _write(self, run: JobRun, done: int, shards: list[dict[str, Any]]) -> None:
        merged: dict[str, dict[str, Any]] = {"model": {}, "parameters": {}, "buffers": {}}
        for shard in shards:
            for key, values in shard.items():
                merged[key].update(values)
        order = [name for name in run.model.state_dict() if name in merged["model"]]
        model = {name: merged["model"][name] for name in order}
        train = {
            "format": _FORMAT,
            "iteration": done,
            **{key: getattr(run.job, key) for key in _MUST_AGREE},
            "stages": [list(row) for row in self.names],
            "parameters": merged["parameters"],
            "buffers": merged["buffers"],
            "optimizer": self.makers[run.index],
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }
        _check_plain(train, f"checkpoint of job {run.title}")
        place = self.folder / run.title
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=place))
        try:
            _save(model, temporary / "model.pt")
            _save(train, temporary / "train.pt")
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o777 & ~mask)
            target = place / str(done)
            if target.exists():  # left by a run that was killed before it moved the pointer
                shutil.rmtree(target)
            temporary.rename(target)
        except OSError as error:
            raise InputError(f"checkpoint: {place} cannot be written ({error})") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync_folder(place)
        write_atomic(place / "latest", f"{done}\n")


def _shard(run: JobRun, stage: int) -> dict[str, Any]:
    """Copies of all that one stage has trained, under unsplit names."""
    part = run.stages[stage]
    persistent = run.model.state_dict()
    own = {name: value for name, value in persistent.items() if name.startswith(part.prefixes)}
    passing = {
        name: buffer
        for name, buffer in run.model.named_buffers()
        if name.startswith(part.prefixes) and name not in persistent
    }
    states = states_by_name([part.optimizer], [part.parameters])
    # one deepcopy over all: plain containers are copied, tensors cloned
    return copy.deepcopy(
        {"model": _detached(own), "parameters": states, "buffers": _detached(passing)}
    )


def _detached(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}


def _restore_model(model: nn.Module, saved: Any, place: Path) -> None:
    own = model.state_dict()
    if not isinstance(saved, dict):
        raise InputError(f"{place}: is not a dictionary of tensors")
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            side = "the checkpoint has no" if name not in saved else "the model has no"
            raise InputError(f"{place}: {side} {name!r}; it belongs to another model")
        a, b = own[name], saved[name]
        if isinstance(a, Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            raise InputError(
                f"{place}: {name!r} is {b.dtype} {tuple(b.shape)}, the model has {a.dtype} "
                f"{tuple(a.shape)}"
            )
    model.load_state_dict(saved)


def _set_buffer(model: nn.Module, name: str, value: Tensor, place: Path) -> None:
    owner, _, last = name.rpartition(".")
    try:
        model.get_submodule(owner)._buffers[last] = value
    except AttributeError:
        raise InputError(f"{place}: the model has no {name!r}") from None


def _check_plain(value: Any, place: str) -> None:
    """Only what `torch.load(weights_only=True)` reads again."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(inner, f"{place}: {key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_plain(inner, place)
    elif not (value is None or isinstance(value, (Tensor, bool, int, float, complex, str))):
        raise InputError(f"{place}: a {type(value).__name__} cannot be kept in a checkpoint")


def _save(value: Any, path: Path) -> None:
    with path.open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__})") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
