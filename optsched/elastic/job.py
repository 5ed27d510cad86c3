"""One elastic training job: what it trains, on how many workers, and when it is done."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.commands import imported
from optsched.cluster.workload.job import ascending, line
from optsched.elastic.equations import pass_samples
from optsched.elastic.micro import MicroController
from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.values import (
    as_python,
    boolean,
    did_you_mean,
    format_value,
    integer,
    number,
    one_of,
)

if TYPE_CHECKING:
    import os
    from types import ModuleType

_FUNCTIONS = ("model", "data", "optimizer", "loss", "metric", "scheduler")
_MICRO = ("alpha", "as_printed", "batch_bounds", "beta", "density", "exposure", "gamma",
          "rate_bounds", "weight_bounds")  # fmt: skip
_HOME = "optsched.elastic.workloads"
_BUILT_IN = ("logistic", "mlp", "cnn", "digits", "sgd", "adam")  # of it, known without torch


@dataclass(frozen=True)
class Call:
    """A function by its place, called in the worker that needs it: nothing is imported before.

    `place` is ``module:function``, ``FILE.py:function``, or the name of a function of
    `optsched.elastic.workloads`; `options` are its keyword arguments.
    """

    place: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *given: Any) -> Any:
        """What the function returns."""
        home, _, name = self.place.rpartition(":")
        if not callable(made := getattr(_module(home or _HOME), name, None)):
            raise InputError(f"{self.place}: there is no such function")
        return made(*given, **self.options)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingJob:
    """A job for `run`. All functions go to worker processes: define them at the top of a module.

    Parameters
    ----------
    name
        Distinct among the jobs of a run.
    model, data
        Functions without arguments: a module, whose output has the classes on axis 1, and a pair
        of map-style datasets of (input, class), for training and for validation.
    optimizer
        Function of the parameters. For a step its learning rates are multiplied by the micro
        level's factor.
    scheduler
        Function of the optimizer: its learning-rate scheduler, with one step per global batch. One
        that needs a metric (``ReduceLROnPlateau``) gets the mean loss of the batch. What the micro
        level's factor multiplies is the rate of the schedule. It goes on over changes of the
        workers and from checkpoints.
    loss
        Function of output and target: the *sum* over the samples. None: cross entropy.
    metric
        Function of output and target: a number per sample, whose mean over the validation data is
        compared with `target`. None: 1 for a right class, so that the mean is the accuracy.
    sizes
        Allowed numbers of workers, ascending.
    batch_size
        Global: of all workers together, at any size.
    passes, samples, target
        Done after so many passes over the data at the latest, or after the first with so many
        training samples in all, or with a validation metric of at least `target` <= 1.
    submit
        Arrival, in seconds after the start of the run.
    priority, weight, group, preemptible, template
        As in `optsched.cluster.Job`. Jobs of one template are taken to have equal pass times.
    expected_passes, pass_seconds
        What policies believe before anything is measured: passes to the target (default `passes`),
        and the time of one on one worker.
    micro
        Options of `MicroController` (without samples, budget and rate): workers get unequal shares;
        and ``exposure``, ``"resample"`` (default) or ``"partition"``, see `VariableBatchLoader`.
        None: equal shares of every batch. With ``density`` a pass of g workers has g times so many
        samples (12), otherwise all training data.
    seed
        Of weights, order and dropout.

    Raises
    ------
    InputError
        A field of a wrong type or range; the message names the job and the field.
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any] | None = None
    metric: Callable[[Any, Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    sizes: tuple[int, ...] = (1,)
    batch_size: int = 64
    passes: int = 10
    samples: int | None = None
    target: float | None = None
    submit: float = 0.0
    priority: int = 50
    weight: float = 1.0
    group: str = ""
    preemptible: bool = True
    template: str = ""
    expected_passes: int | None = None
    pass_seconds: float | None = None
    micro: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at = f"job {format_value(line('job.name', self.name, empty=False))}: "
        if self.name.startswith(".") or set(self.name) & set('/\\:*?"<>|'):
            raise InputError(f"{at}name: it becomes a folder, so no leading dot and none of /\\:*")
        own: dict[str, Any] = {"name": str(self.name), "sizes": ascending(f"{at}sizes", self.sizes)}
        if own["sizes"][0] == 0:
            raise InputError(f"{at}sizes: expected numbers of workers >= 1, got 0")
        given = {key: value for key, value in self.__dict__.items() if value is not None}
        for key, least, most in (
            ("batch_size", own["sizes"][-1], 2**30), ("passes", 1, 10**6), ("samples", 1, 2**53),
            ("priority", 1, 99), ("expected_passes", 1, 10**6), ("seed", 0, 2**32 - 1),
        ):  # fmt: skip
            if key in given:
                own[key] = integer(f"{at}{key}", given[key], least, most)
        for key, top in (("weight", math.inf), ("target", 1.0), ("pass_seconds", math.inf)):
            if key in given:
                own[key] = number(f"{at}{key}", given[key], 0.0, top, above=True)
        own["submit"] = number(f"{at}submit", self.submit)
        for key in ("group", "template"):
            own[key] = line(f"{at}{key}", getattr(self, key))
        own["preemptible"] = boolean(f"{at}preemptible", self.preemptible)
        for key in _FUNCTIONS:
            if not callable(given.get(key)) and (key in given or key in _FUNCTIONS[:3]):
                raise InputError(
                    f"{at}{key}: expected a function, got {format_value(given.get(key))}"
                )
        if isinstance(self.micro, Mapping):
            own["micro"] = {key: as_python(value) for key, value in self.micro.items()}
        self.__dict__.update(own)
        if self.micro is not None and not isinstance(self.micro, Mapping):
            raise InputError(
                f"{at}micro: expected a table of options, got {format_value(self.micro)}"
            )
        for key in sorted({*(self.micro or ())} - {*_MICRO}, key=str):
            raise InputError(f"{at}micro: no {format_value(key)}; it has {', '.join(_MICRO)}")
        try:
            for size in self.sizes if self.micro is not None else ():
                self.controller(size, 10**6, 1e-3).step([0.5] * size, [0.5] * size)
        except (InputError, TypeError) as error:
            raise InputError(f"{at}micro: {error}") from None

    @property
    def exposure(self) -> str:
        """How workers draw samples."""
        return "partition" if self.micro is None else self.micro.get("exposure", "resample")

    def pass_samples(self, workers: int, samples: int) -> int:
        """Samples of a pass on so many workers, with training data of so many samples (12)."""
        density = None if self.micro is None else self.micro.get("density")
        return samples if density is None else pass_samples(workers, density)

    def controller(self, workers: int, samples: int, rate: float) -> MicroController:
        """A fresh micro level for data of so many samples and this initial learning rate."""
        options = dict(self.micro or {})
        options.pop("exposure", None)
        exposure = one_of("exposure", self.exposure, ("partition", "resample"))
        if options.get("as_printed") and exposure == "partition":
            raise InputError("as_printed: its samples do not add up; take exposure='resample'")
        bounds = {
            "batch_bounds": (min(2, self.batch_size // workers), self.batch_size),
            "rate_bounds": (min(1e-5, rate), max(1e-2, rate)),
        }
        return MicroController(self.batch_size, samples=samples, rate=rate, **bounds | options)


def modules_of(job: TrainingJob) -> set[str]:
    """Modules of a job's functions."""
    functions: list[Any] = [getattr(job, key) for key in _FUNCTIONS[:3]]
    plain = [getattr(f, "func", f) for f in functions if not isinstance(f, Call)]  # of a partial
    homes = [f.place.rpartition(":")[0] or _HOME for f in functions if isinstance(f, Call)]
    homes += [str(getattr(f, "__module__", "__main__")) for f in plain]
    return {home for home in homes if not home.endswith(".py")}


def pickled(job: TrainingJob) -> bytes:
    """A job as workers get it; `InputError` if a function cannot go to another process."""
    try:
        return pickle.dumps(job)
    except Exception as error:
        raise InputError(
            f"job {format_value(job.name)}: a function cannot go to another process ({error}); "
            "use one at "
            "the top of a module, or functools.partial of one"
        ) from None


def read_jobs(path: str | os.PathLike[str]) -> list[TrainingJob]:
    """Jobs of a TOML file: one table ``[[jobs]]`` each, with the fields of `TrainingJob`.

    Functions are texts (see `Call`), or tables ``{call = "cnn", classes = 5}`` with arguments;
    paths of Python files are relative to the TOML file. An InputError names file, job and field.
    """
    try:
        tree = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: no TOML ({error})") from None
    rows = tree.pop("jobs", None)
    if tree or not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        extra = f", and no {format_value(next(iter(tree)))}" if tree else ""
        raise InputError(f"{path}: expected tables [[jobs]]{extra}")
    known, found = [f.name for f in fields(TrainingJob)], []
    for i, row in enumerate(rows):
        place = f"{path}: jobs[{i}]"
        for key in row.keys() - known:
            hint = did_you_mean(key, known)
            raise InputError(f"{place}: there is no field {format_value(key)}{hint}")
        for key in ("name", *_FUNCTIONS[:3]):
            if key not in row:
                raise InputError(f"{place}: {key} is missing")
        for key in _FUNCTIONS:
            if key in row:
                row[key] = _call(f"{place}.{key}", row[key], Path(path).parent)
        if isinstance(row.get("sizes"), list):
            row["sizes"] = tuple(row["sizes"])
        try:
            found.append(TrainingJob(**row))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    return found


def _call(place: str, value: Any, folder: Path) -> Call:
    options = dict(value) if isinstance(value, dict) else {"call": value}
    call = options.pop("call", None)
    if not isinstance(call, str) or not call.rpartition(":")[2].isidentifier():
        forms = '"module:function", "FILE.py:function" or {call = such a text, ...}'
        raise InputError(f"{place}: expected {forms}, got {format_value(value)}")
    home, _, name = call.rpartition(":")
    if home.endswith(".py"):
        if not (folder / home).is_file():
            raise InputError(f"{place}: {folder / home}: no such file")
        call = f"{(folder / home).resolve()}:{name}"
    elif not home and name not in _BUILT_IN:
        raise InputError(
            f"{place}: there is no {format_value(name)}; built in: {', '.join(_BUILT_IN)}"
        )
    elif home and importlib.util.find_spec(home.partition(".")[0]) is None:
        raise InputError(f"{place}: there is no module {format_value(home)}")
    return Call(call, options)


@cache
def _module(home: str) -> ModuleType:
    return imported(Path(home)) if home.endswith(".py") else importlib.import_module(home)
