"""One elastic training job: what it trains, on how many workers, and when it is done."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.commands import imported
from optsched.cluster.workload.job import ascending, line
from optsched.elastic.micro import MicroController, pass_samples
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

_FUNCTIONS = ("model", "data", "optimizer", "loss", "metric", "scheduler", "collate")
_MICRO = ("alpha", "batch_bounds", "beta", "exposure", "gamma", "rate_bounds", "weight_bounds")
_WORKLOADS = "optsched.elastic.workloads"
_BUILT_IN = ("logistic", "mlp", "cnn", "digits", "sgd", "adam")  # its functions, without its import


@dataclass(frozen=True)
class Call:
    """Name a function that is imported and called in the worker processes only.

    `place` is ``module:function``, ``FILE.py:function``, or a name in `optsched.elastic.workloads`;
    `options` are its keyword arguments.

    Examples
    --------
    >>> from optsched.elastic import Call
    >>> Call("builtins:dict", {"width": 64})()
    {'width': 64}
    """

    place: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *given: Any) -> Any:
        """Import the function and call it."""
        module, _, name = self.place.rpartition(":")
        if not callable(function := getattr(_module(module or _WORKLOADS), name, None)):
            raise InputError(f"{self.place}: there is no such function")
        return function(*given, **self.options)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingJob:
    """Describe a job for `run`; define its functions at the top of a module.

    Parameters
    ----------
    name
        Distinct among the jobs of a run.
    model, data
        Functions without arguments: a module, and a pair of map-style datasets, for training and
        for validation. Samples are pairs (input, class), with the classes on axis 1 of the output;
        or dictionaries: the arguments of the model, ``labels`` among them, with the classes on the
        last axis. The output is a tensor, or an object with ``logits`` (Hugging Face).
    optimizer, scheduler
        Function of the parameters; function of the optimizer: a learning-rate scheduler with one
        step per global batch (``ReduceLROnPlateau`` gets its mean loss). The factor of the micro
        level multiplies the scheduled rate for the step only.
    loss
        Function of output and target (of dictionaries: the whole batch): the *sum* over the
        samples, or a pair (sum, number of targets). None: cross entropy for pairs; for dictionaries
        the model's ``loss``, a mean over the labels that are not -100, which is checked once.
    metric
        Function of output and target: a number per sample, or a pair (sum, number of targets).
        Its mean over the validation data is compared with `target`. None: the share of classes
        (of labels that are not -100) that are predicted right.
    collate
        Function of a list of samples: a batch, such as with padding. None: torch's default.
    sizes, batch_size
        Allowed numbers of workers, ascending; samples of a step of all workers together.
    density
        Samples of a pass for every worker: a pass of g workers has N = g * density samples, (12) of
        the Entropy paper. None: all training data.
    passes, samples, target
        The job ends after `passes` passes, or earlier: after the first with `samples` training
        samples in all, or with a validation metric of at least `target` <= 1.
    submit
        Arrival, in seconds after the start of the run.
    priority, weight, group, preemptible, template
        As in `optsched.cluster.Job`. Pass times are shared by the jobs of a template.
    expected_passes, pass_seconds
        Estimates before measurements: passes to the target (default `passes`), and seconds of a
        pass on one worker.
    micro
        Options of `MicroController` (without samples, density, budget and rate), and ``exposure``,
        see `VariableBatchLoader` (default ``"resample"``): unequal shares. None: equal shares.
    seed
        Of weights, order and dropout.

    Raises
    ------
    InputError
        A field of a wrong type or range; the message names the job and the field.

    Examples
    --------
    >>> from optsched.elastic import Call, TrainingJob
    >>> job = TrainingJob(name="a", model=Call("mlp", {"width": 32}), data=Call("digits"),
    ...                   optimizer=Call("adam"), sizes=[1, 2], passes=5)
    >>> job.sizes
    (1, 2)
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any] | None = None
    metric: Callable[[Any, Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    sizes: tuple[int, ...] = (1,)
    batch_size: int = 64
    density: float | None = None
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
        sizes = ascending(f"{at}sizes", self.sizes)
        if sizes[0] == 0:
            raise InputError(f"{at}sizes: expected numbers of workers >= 1, got 0")
        checked: dict[str, Any] = {"name": str(self.name), "sizes": sizes}
        given = {key: value for key, value in self.__dict__.items() if value is not None}
        for key, least, most in (
            ("batch_size", sizes[-1], 2**30), ("passes", 1, 10**6), ("samples", 1, 2**53),
            ("priority", 1, 99), ("expected_passes", 1, 10**6), ("seed", 0, 2**32 - 1),
        ):  # fmt: skip
            if key in given:
                checked[key] = integer(f"{at}{key}", given[key], least, most)
        for key, top in (
            ("weight", math.inf), ("target", 1.0), ("pass_seconds", math.inf), ("density", 2**30),
        ):  # fmt: skip
            if key in given:
                checked[key] = number(f"{at}{key}", given[key], 0.0, top, above=True)
        checked["submit"] = number(f"{at}submit", self.submit)
        for key in ("group", "template"):
            checked[key] = line(f"{at}{key}", getattr(self, key))
        checked["preemptible"] = boolean(f"{at}preemptible", self.preemptible)
        for key in _FUNCTIONS:
            if not callable(given.get(key)) and (key in given or key in _FUNCTIONS[:3]):
                value = format_value(given.get(key))
                raise InputError(f"{at}{key}: expected a function, got {value}")
        if isinstance(self.micro, Mapping):
            checked["micro"] = {key: as_python(value) for key, value in self.micro.items()}
        self.__dict__.update(checked)
        self._check_levels(at)

    def _check_levels(self, at: str) -> None:
        """Refuse options of the micro level, or a density, that some size cannot have."""
        if self.micro is not None and not isinstance(self.micro, Mapping):
            value = format_value(self.micro)
            raise InputError(f"{at}micro: expected a table of options, got {value}")
        for key in sorted({*(self.micro or ())} - {*_MICRO}, key=str):
            raise InputError(f"{at}micro: no {format_value(key)}; it has {', '.join(_MICRO)}")
        if self.density is not None and self.exposure == "partition":
            raise InputError(f"{at}density: needs samples that are drawn, exposure='resample'")
        try:
            for size in self.sizes:
                self.pass_samples(size, 1)
                if self.micro is not None:
                    self.controller(size, 10**6, 1e-3).step([0.5] * size, [0.5] * size)
        except (InputError, TypeError) as error:
            raise InputError(f"{at}{'' if self.micro is None else 'micro: '}{error}") from None

    @property
    def exposure(self) -> str:
        """How workers draw samples: ``"resample"`` with a micro level or a density."""
        default = "partition" if self.micro is None and self.density is None else "resample"
        return str((self.micro or {}).get("exposure", default))

    def pass_samples(self, workers: int, samples: int) -> int:
        """Samples of a pass on so many workers, with training data of so many samples (12)."""
        return samples if self.density is None else pass_samples(workers, self.density)

    def controller(self, workers: int, samples: int, rate: float) -> MicroController:
        """Make the micro level for data of so many samples and this initial learning rate."""
        options = dict(self.micro or {})
        options.pop("exposure", None)
        one_of("exposure", self.exposure, ("partition", "resample"))
        options = {
            "samples": samples, "density": self.density, "rate": rate,
            "batch_bounds": (min(2, self.batch_size // workers), self.batch_size),
            "rate_bounds": (min(1e-5, rate), max(1e-2, rate)),
        } | options  # fmt: skip
        return MicroController(self.batch_size, **options)


def modules_of(job: TrainingJob) -> set[str]:
    """Modules of a job's functions, to be imported before it starts."""
    functions = [getattr(job, key) for key in _FUNCTIONS[:3]]
    places = [
        f.place.rpartition(":")[0] or _WORKLOADS if isinstance(f, Call)
        else str(getattr(getattr(f, "func", f), "__module__", "__main__"))
        for f in functions
    ]  # fmt: skip
    return {place for place in places if not place.endswith(".py")}


def pickled(job: TrainingJob) -> bytes:
    """Pickle a job for its workers; `InputError` if a function cannot be sent to a process."""
    try:
        return pickle.dumps(job)
    except Exception as error:
        at = f"job {format_value(job.name)}: a function cannot go to another process ({error})"
        raise InputError(f"{at}; use one of a module, or functools.partial of one") from None


def read_jobs(path: str | os.PathLike[str]) -> list[TrainingJob]:
    """Read the jobs of a TOML file: tables ``[[jobs]]`` with the fields of `TrainingJob`.

    Functions are strings (see `Call`), or tables ``{call = "cnn", classes = 5}`` with arguments;
    paths are relative to the TOML file. An InputError names file, job and field.

    Examples
    --------
    >>> from importlib import resources
    >>> from optsched.elastic import read_jobs
    >>> jobs = read_jobs(resources.files("optsched.elastic") / "demo.toml")
    >>> jobs[0].name, jobs[0].sizes
    ('mlp', (1, 2))
    """
    text = read_text(path)
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
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
        for key in {"name", *_FUNCTIONS[:3]} - row.keys():
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
        forms = '"module:function", "FILE.py:function" or {call = such a string, ...}'
        raise InputError(f"{place}: expected {forms}, got {format_value(value)}")
    module, _, name = call.rpartition(":")
    if module.endswith(".py"):
        if not (folder / module).is_file():
            raise InputError(f"{place}: {folder / module}: no such file")
        call = f"{(folder / module).resolve()}:{name}"
    elif not module and name not in _BUILT_IN:
        raise InputError(f"{place}: no {format_value(name)}; built in: {', '.join(_BUILT_IN)}")
    elif module:
        with suppress(ValueError):  # of __main__ in a script
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                return Call(call, options)
        raise InputError(f"{place}: there is no module {format_value(module)}")
    return Call(call, options)


@cache
def _module(place: str) -> ModuleType:
    return imported(Path(place)) if place.endswith(".py") else importlib.import_module(place)
