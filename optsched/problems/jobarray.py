"""Job arrays: sibling training jobs that share one pipeline of devices (ArrayPipe's JAPSP)."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from optsched import bounds
from optsched.errors import InputError
from optsched.problems.problem import Problem
from optsched.schedule import IntArray
from optsched.strict_json import MAX_INTEGER, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.schedule import Schedule

Place: TypeAlias = "tuple[int, ...] | tuple[tuple[tuple[int, ...], ...], ...]"

PER_STAGE: Final = (
    "forward", "backward", "weight", "recompute", "update", "switch", "activation", "checkpoint",
    "recompute_workspace", "weight_memory", "state",
)  # fmt: skip
PER_CUT: Final = ("lag_forward", "lag_backward")
PER_JOB: Final = ("micro_batches", "multiplicity", "release")
CHOICES: Final = {
    "objective": ("makespan", "period"),
    "update_mode": ("fused", "block", "global", "none"),
    "microbatch_order": ("fixed", "free"),
    "switch_on": ("out", "in"),
    "time_unit": ("ns", "us", "ms", "s"),
}
_ZERO: Final[Any] = 0  # fills an array of the right shape
_ONE: Final[Any] = 1
RECOMPUTE_MODES: Final = ("never", "always", "choose")
FLAGS: Final = ("recompute_as_block", "update_blocks_gradient", "trailing_switch")


@dataclass(frozen=True, eq=False, repr=False)
class JobArray(Problem):
    """K sibling jobs on V virtual stages: order every forward and backward block on its device.

    Times are integers for one micro-batch in `time_unit`, memory is in bytes. Arrays have shape
    (K, V), a scalar stands for all of them. See Eq. 1-9 of the ArrayPipe paper for the symbols in
    brackets.

    Parameters
    ----------
    forward, backward
        Block times [r_f, r_b]. With `weight`, `backward` is the input gradient only.
    weight
        Weight-gradient block times (kind ``W``); then the gradient block is of kind ``I``.
    recompute, update, switch
        Re-materialisation [re], optimizer step [u], changing away from the job on a device [w].
    lag_forward, lag_backward
        Communication times, shape (K, V-1) [eta]: F(v) to F(v+1), and B(v+1) to B(v).
    activation, checkpoint
        Bytes kept from F to B, without and with recomputation.
    recompute_workspace
        Extra bytes while a recomputing block runs.
    weight_memory
        Part of the kept bytes that ``I`` leaves for ``W`` to free.
    state
        Bytes of model state (for reports; not a constraint).
    micro_batches, multiplicity, release
        Per job, shape (K,): micro-batches M_j, iterations per cycle (period objective), release.
    place
        Device of each virtual stage, shape (V,), or of each ``[job][micro-batch][stage]``;
        default stage v on device v.
    memory
        Bytes left for activations on each device; 0 = unlimited.
    devices, servers, names
        Names of devices and their servers, names of jobs.
    objective
        ``"makespan"``: end of one iteration of all jobs; ``"period"``: rolling execution.
    recompute_mode
        ``"never"``, ``"always"``, ``"choose"`` or one bool per job.
    recompute_as_block
        Recomputation as an operation R of its own, which may run before the gradient arrives.
    update_mode
        ``"fused"`` into the last gradient block, an own ``"block"`` U, ``"global"`` (U waits for
        all stages, as gradient clipping needs), or ``"none"``.
    update_blocks_gradient
        Whether a fused update delays the gradient to the previous stage.
    microbatch_order
        ``"fixed"``: ascending per (job, stage) and kind; ``"free"``.
    switch_on
        Whose switch time counts between two jobs: ``"out"`` the earlier one's, ``"in"`` the later.
    trailing_switch
        Count the switch after a job's last block too (the paper's Eq. 3).

    Raises
    ------
    InputError
        Naming the field, the index, the value and the legal range.
    """

    forward: IntArray
    backward: IntArray
    _: KW_ONLY
    weight: IntArray | None = None
    recompute: IntArray = _ZERO
    update: IntArray = _ZERO
    switch: IntArray = _ZERO
    lag_forward: IntArray = _ZERO
    lag_backward: IntArray = _ZERO
    activation: IntArray = _ZERO
    checkpoint: IntArray = _ZERO
    recompute_workspace: IntArray = _ZERO
    weight_memory: IntArray = _ZERO
    state: IntArray = _ZERO
    micro_batches: IntArray = _ONE
    multiplicity: IntArray = _ONE
    release: IntArray = _ZERO
    place: Place = None  # type: ignore[assignment]  # stage v on device v
    memory: IntArray = None  # type: ignore[assignment]  # unlimited
    devices: tuple[str, ...] = None  # type: ignore[assignment]  # gpu0, gpu1, ...
    servers: tuple[str, ...] = None  # type: ignore[assignment]  # no names
    names: tuple[str, ...] = None  # type: ignore[assignment]  # job0, job1, ...
    objective: str = "makespan"
    recompute_mode: str | tuple[bool, ...] = "never"
    recompute_as_block: bool = False
    update_mode: str = "fused"
    update_blocks_gradient: bool = False
    microbatch_order: str = "fixed"
    switch_on: str = "out"
    trailing_switch: bool = False
    name: str = ""
    time_unit: str = "us"

    def __post_init__(self) -> None:
        shape = _shape(self.forward)
        fixed: dict[str, Any] = {}
        for key in PER_STAGE:
            if key != "weight" or self.weight is not None:
                fixed[key] = _table(key, getattr(self, key), shape)
        for key in PER_CUT:
            fixed[key] = _table(key, getattr(self, key), (shape[0], shape[1] - 1), -MAX_INTEGER)
        for key in PER_JOB:
            least = 0 if key == "release" else 1
            fixed[key] = _table(key, getattr(self, key), (shape[0],), least)
        for key, legal in CHOICES.items():
            if getattr(self, key) not in legal:
                found = getattr(self, key)
                raise InputError(f"{key}: expected one of {', '.join(legal)}, got {found!r}")
        for key in FLAGS:
            if not isinstance(getattr(self, key), bool):
                raise InputError(f"{key}: expected true or false, got {getattr(self, key)!r}")
        if not isinstance(self.name, str) or len(self.name) > 200:
            raise InputError("name: expected a string of at most 200 characters")
        fixed["recompute_mode"] = _recompute_mode(self.recompute_mode, shape[0])
        fixed["names"] = _names("names", self.names, "job", shape[0])
        fixed["place"] = _place(self.place, fixed["micro_batches"], shape[1])
        fixed.update(self._devices(fixed["place"]))
        for key, value in fixed.items():
            object.__setattr__(self, key, value)
        self._check()

    @property
    def n_jobs(self) -> int:
        """Number of jobs K."""
        return int(self.forward.shape[0])

    @property
    def n_stages(self) -> int:
        """Number of virtual stages V."""
        return int(self.forward.shape[1])

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def objective_name(self) -> str:
        """``"makespan"`` or ``"period"``."""
        return self.objective

    @classmethod
    def from_profile(
        cls, model: str, stages: int, batch_sizes: Sequence[int], **options: Any
    ) -> JobArray:
        """A job array of a real model by the analytic cost model of `optsched.pipelines.profiles`.

        Parameters
        ----------
        model
            ``"vgg19"``, ``"resnet152"``, ``"bert_large"`` or ``"gpt2_xl"``.
        stages
            Number of pipeline stages, one per device.
        batch_sizes
            One per job.
        options
            Those of `optsched.pipelines.profiles.job_array_fields` (``link``, ``memory``,
            ``partition``, ...) and of `JobArray`.
        """
        from inspect import signature

        from optsched.pipelines.profiles import job_array_fields

        ours = {key: options.pop(key) for key in list(options) if key in _DIRECT_OPTIONS}
        legal = signature(job_array_fields).parameters
        for key in options:
            if key not in legal:
                raise InputError(
                    f"{key}: not an option of from_profile; there are "
                    f"{', '.join(sorted({*legal, *_DIRECT_OPTIONS} - {'model', 'stages', 'batch_sizes'}))}"
                )
        fields = job_array_fields(model, stages, batch_sizes, **options)
        return cls(**{**fields, **ours})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> JobArray:
        """Read a ``*.jobarray.json`` document (``optsched.jobarray/1``) strictly."""
        from optsched.files import read_text
        from optsched.formats import jobarray_json

        return jobarray_json.read(read_text(path), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write an ``optsched.jobarray/1`` document (whole file or nothing)."""
        from optsched.files import write_atomic
        from optsched.formats import jobarray_json

        write_atomic(path, jobarray_json.write(self))

    def replace(self, **changes: Any) -> JobArray:
        """A copy with some constructor arguments changed."""
        unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise InputError(f"{min(unknown)}: a JobArray has no such field")
        return dataclasses.replace(self, **changes)

    def with_objective(self, objective: str) -> JobArray:
        """The same array with another objective."""
        return self.replace(objective=objective)

    def without(self, job: int) -> JobArray:
        """The array without one job."""
        if not 0 <= job < self.n_jobs or self.n_jobs == 1:
            raise InputError(f"job: expected 0..{self.n_jobs - 1} of several jobs, got {job}")
        return self.subset([j for j in range(self.n_jobs) if j != job])

    def subset(self, jobs: Sequence[int]) -> JobArray:
        """The array of the given jobs only, in that order."""
        rows = list(jobs)
        changes: dict[str, Any] = {
            key: None if getattr(self, key) is None else getattr(self, key)[rows]
            for key in (*PER_STAGE, *PER_CUT, *PER_JOB)
        }
        changes["names"] = [self.names[j] for j in rows]
        if not isinstance(self.recompute_mode, str):
            changes["recompute_mode"] = [self.recompute_mode[j] for j in rows]
        if not isinstance(self.place[0], int):
            changes["place"] = [self.place[j] for j in rows]
        return self.replace(**changes)

    def devices_of(self, job: int, microbatch: int = 0) -> IntArray:
        """Device of every virtual stage for one micro-batch of a job; shape (V,)."""
        row = self.place[job][microbatch] if not isinstance(self.place[0], int) else self.place  # type: ignore[index]
        return np.array(row, np.int64)

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """Which jobs recompute; `InputError` for ``recompute_mode="choose"``."""
        if self.recompute_mode == "choose":
            raise InputError(
                'recompute_mode is "choose": say graph(recompute=[...]), or replace it by '
                '"never", "always" or one bool per job'
            )
        if isinstance(self.recompute_mode, str):
            return (self.recompute_mode == "always",) * self.n_jobs
        return self.recompute_mode

    def graph(self, recompute: Sequence[bool] | None = None) -> Schedule:
        """The disjunctive graph of one iteration of all jobs.

        Operation ids are job-major and topological: per micro-batch F(0..V-1), then from stage V-1
        down [R,] B (or I, W); then per job U(0..V-1) and ``end``.

        Parameters
        ----------
        recompute
            Which jobs recompute, if not as `recompute_mode` says.
        """
        if recompute is not None:
            chosen = _recompute_mode(recompute, self.n_jobs)
            return self.replace(recompute_mode=chosen).graph()
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        from optsched.problems.jobarray_graph import build

        return build(self, self.recomputes)

    def bounds(self) -> dict[str, int]:
        """All lower bounds by name (``chain``, ``load``, ``one_machine``, ``energy``)."""
        return bounds.makespan_bounds(self.graph())

    def infeasibility(self) -> str:
        """The first job that cannot run even alone: which device it overflows, by how much."""
        from optsched.problems.jobarray_graph import overflow_alone

        return overflow_alone(self) or super().infeasibility()

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical document."""
        import hashlib

        from optsched.formats import jobarray_json

        return hashlib.sha256(jobarray_json.write(self)).hexdigest()

    def __repr__(self) -> str:
        return (
            f"<JobArray {self.name!r}: {self.n_jobs} jobs, {self.n_stages} stages "
            f"on {self.n_devices} devices>"
        )

    def _devices(self, place: Place) -> dict[str, Any]:
        """Names, servers and memory of the devices; refuses a stage on none of them."""
        used = 1 + max(_flat(place))
        memory = 0 if self.memory is None else self.memory
        known = self.devices if self.devices is not None else self.servers
        count = used if known is None else len(known)
        if known is None and np.ndim(memory) == 1:
            count = len(np.asarray(memory))
        if used > count:
            raise InputError(f"place: device {used - 1} does not exist (there are {count})")
        return {
            "devices": _names("devices", self.devices, "gpu", count),
            "servers": _names("servers", self.servers, None, count),
            "memory": _table("memory", memory, (count,)),
        }

    def _check(self) -> None:
        """Rules that join several fields."""
        kept = np.minimum(self.activation, self.checkpoint)
        if self.recompute_mode == "never":
            kept = self.activation
        elif self.recompute_mode == "always":
            kept = self.checkpoint
        elif not isinstance(self.recompute_mode, str):
            kept = np.where(np.array(self.recompute_mode)[:, None], self.checkpoint, self.activation)
        if self.weight is None and self.weight_memory.any():
            raise InputError("weight_memory: needs weight blocks (weight=...)")
        _refuse(self.weight_memory > kept, "weight_memory", self.weight_memory, "at most the kept bytes")
        _refuse(self.lag_forward < -self.forward[:, :-1], "lag_forward", self.lag_forward,
                "not below minus the forward time of its stage")  # fmt: skip
        _refuse(self.lag_backward < -self.backward[:, 1:], "lag_backward", self.lag_backward,
                "not below minus the backward time of the stage it leaves")  # fmt: skip
        if self.update_mode == "fused" and self.microbatch_order == "free" and self.update.any():
            raise InputError(
                'update_mode: "fused" needs microbatch_order="fixed" (else the last micro-batch is '
                'unknown); use "block"'
            )
        if self.objective == "period" and self.release.any():
            raise InputError('release: not allowed with objective="period"')
        self._check_switches()

    def _check_switches(self) -> None:
        """One switch time per (job, device): then setups are triangular."""
        if not self.switch.any() or self.n_devices == self.n_stages == len(set(self.place)):
            return
        for j in range(self.n_jobs):
            for m in range(int(self.micro_batches[j])):
                device = self.devices_of(j, m)
                for v, d in enumerate(device.tolist()):
                    first = int(np.argmax(device == d))
                    if self.switch[j, v] != self.switch[j, first]:
                        raise InputError(
                            f"jobs[{j}].switch[{v}]: {self.switch[j, v]}, but stage {first} on the "
                            f"same device has {self.switch[j, first]}"
                        )


_DIRECT_OPTIONS = (
    "objective", "recompute_as_block", "update_mode", "update_blocks_gradient",
    "microbatch_order", "switch_on", "trailing_switch", "names", "name", "multiplicity", "release",
    "devices", "servers",
)  # fmt: skip


def _shape(forward: npt.ArrayLike) -> tuple[int, int]:
    array = _array("forward", forward)
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(
            f"forward: expected one row per job with one value per stage, got shape {array.shape}"
        )
    return int(array.shape[0]), int(array.shape[1])


def _array(key: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise InputError(f"{key}: the rows differ in length") from None
    if array.dtype == object:
        raise InputError(f"{key}: expected integers <= 2^53")
    if array.dtype.kind == "b" or (array.dtype.kind != "i" and array.dtype.kind != "u" and array.size):
        raise InputError(f"{key}: expected integers, got {array.dtype} values")
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_INTEGER:
        raise InputError(f"{key}: expected integers <= 2^53, got {array.max()}")
    return array.astype(np.int64)


def _table(key: str, values: Any, shape: tuple[int, ...], least: int = 0) -> IntArray:
    """An array of the given shape with values in least..2^53; a scalar fills it."""
    array = _array(key, values)
    if array.ndim == 0:
        array = np.full(shape, array)
    if array.shape != shape:
        raise InputError(f"{key}: expected shape {shape}, got {array.shape}")
    _refuse(array < least, key, array, f"an integer >= {least}")
    _refuse(array > MAX_INTEGER, key, array, "an integer <= 2^53")
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def _refuse(bad: npt.NDArray[np.bool_], key: str, values: IntArray, rule: str) -> None:
    if not bad.any():
        return
    at = [int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape)]
    where = f"devices[{at[0]}].{key}" if key == "memory" else f"jobs[{at[0]}].{key}"
    where += "".join(f"[{k}]" for k in at[1:])
    raise InputError(f"{where}: expected {rule}, got {values[tuple(at)]}")


def _names(
    key: str, given: Sequence[str] | None, prefix: str | None, count: int
) -> tuple[str, ...]:
    """Distinct names ``prefix0, prefix1, ...`` unless given; without prefix "" and any names."""
    if given is None:
        return tuple("" if prefix is None else f"{prefix}{k}" for k in range(count))
    names = tuple(given)
    if len(names) != count:
        raise InputError(f"{key}: expected {count} names, got {len(names)}")
    seen: dict[str, int] = {}
    for k, text in enumerate(names):
        if not isinstance(text, str) or len(text) > 200:
            raise InputError(f"{key}[{k}]: expected a string of at most 200 characters")
        if prefix is not None and text in seen:
            raise InputError(f"{key}[{k}]: {shown(text)} is also the name of {key}[{seen[text]}]")
        seen[text] = k
    return names


def _flat(place: Place) -> list[int]:
    if isinstance(place[0], int):
        return list(place)  # type: ignore[arg-type]
    return [d for job in place for row in job for d in row]  # type: ignore[union-attr]


def _recompute_mode(given: str | Sequence[bool], n_jobs: int) -> str | tuple[bool, ...]:
    if isinstance(given, str):
        if given not in RECOMPUTE_MODES:
            raise InputError(
                f"recompute_mode: expected one of {', '.join(RECOMPUTE_MODES)} or one bool per job, "
                f"got {given!r}"
            )
        return given
    chosen = tuple(given)
    if len(chosen) != n_jobs or not all(isinstance(c, (bool, np.bool_)) for c in chosen):
        raise InputError(f"recompute_mode: expected {n_jobs} times true or false, one per job")
    return tuple(bool(c) for c in chosen)


def _place(given: Sequence[Any] | None, micro_batches: IntArray, n_stages: int) -> Place:
    if given is None:
        return tuple(range(n_stages))
    rows = list(given)
    if rows and not isinstance(rows[0], (int, np.integer)):
        if len(rows) != len(micro_batches):
            raise InputError(f"place: expected one entry per job ({len(micro_batches)}), got {len(rows)}")
        nested = []
        for j, job in enumerate(rows):
            if len(job) != micro_batches[j]:
                raise InputError(
                    f"place[{j}]: expected one row per micro-batch ({micro_batches[j]}), got {len(job)}"
                )
            nested.append(
                tuple(_devices(f"place[{j}][{m}]", row, n_stages) for m, row in enumerate(job))
            )
        return tuple(nested)
    return _devices("place", rows, n_stages)


def _devices(where: str, row: Sequence[Any], n_stages: int) -> tuple[int, ...]:
    if len(row) != n_stages:
        raise InputError(f"{where}: expected one device per stage ({n_stages}), got {len(row)}")
    for v, device in enumerate(row):
        if isinstance(device, bool) or not isinstance(device, (int, np.integer)) or device < 0:
            raise InputError(f"{where}[{v}]: expected a device number >= 0, got {device!r}")
        if device > 1_000_000:
            raise InputError(f"{where}[{v}]: device {device} does not exist")
    return tuple(int(device) for device in row)
