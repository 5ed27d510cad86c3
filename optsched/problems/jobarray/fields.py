"""The fields of a job array: what they are called, what they may be, and how they are checked."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypedDict

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import boolean, label, one_of
from optsched.problems.jobarray.checks import (
    Place,
    check_blocks,
    check_together,
    device_fields,
    jobs_of,
    names_of,
    place_of,
    recompute_of,
    refuse_unknown,
    shape_of,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self, Unpack

    import numpy.typing as npt

    from optsched.model.schedule import IntArray

PER_STAGE: Final = (
    "forward", "backward", "weight", "recompute", "update", "switch", "activation", "checkpoint",
    "recompute_workspace", "weight_memory", "state",
)  # fmt: skip
PER_CUT: Final = ("lag_forward", "lag_backward")
PER_JOB: Final = ("micro_batches", "multiplicity", "release", "batch_size")
MAY_BE_0: Final = ("release", "batch_size")
CHOICES: Final = {
    "objective": ("makespan", "period"),
    "update_mode": ("fused", "block", "global", "none"),
    "microbatch_order": ("fixed", "free"),
    "switch_on": ("out", "in"),
    "time_unit": ("ns", "us", "ms", "s"),
}
FLAGS: Final = ("recompute_as_block", "update_blocks_gradient", "trailing_switch")


class Fields(TypedDict, total=False):
    """What `JobArray` takes besides forward and backward times; explained there."""

    weight: npt.ArrayLike | None
    recompute: npt.ArrayLike
    update: npt.ArrayLike
    switch: npt.ArrayLike
    lag_forward: npt.ArrayLike
    lag_backward: npt.ArrayLike
    activation: npt.ArrayLike
    checkpoint: npt.ArrayLike
    recompute_workspace: npt.ArrayLike
    weight_memory: npt.ArrayLike
    state: npt.ArrayLike
    micro_batches: npt.ArrayLike
    multiplicity: npt.ArrayLike
    release: npt.ArrayLike
    batch_size: npt.ArrayLike
    place: Sequence[Any] | None
    memory: npt.ArrayLike | None
    devices: Sequence[str] | None
    servers: Sequence[str] | None
    names: Sequence[str] | None
    objective: str
    recompute_mode: str | Sequence[bool]
    recompute_as_block: bool
    update_mode: str
    update_blocks_gradient: bool
    microbatch_order: str
    switch_on: str
    trailing_switch: bool
    name: str
    time_unit: str


DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(PER_STAGE[2:] + PER_CUT + PER_JOB, 0),
    **dict.fromkeys(("weight", "place", "memory", "devices", "servers", "names")),
    **{key: values[0] for key, values in CHOICES.items()},
    **dict.fromkeys(FLAGS, False),
    "micro_batches": 1, "multiplicity": 1, "recompute_mode": "never", "name": "", "time_unit": "us",
}  # fmt: skip
DIRECT_OPTIONS: Final = (
    "objective", "recompute_as_block", "update_mode", "update_blocks_gradient",
    "microbatch_order", "switch_on", "trailing_switch", "names", "name", "multiplicity", "release",
    "devices", "servers",
)  # fmt: skip
"""Fields that `JobArray.from_profile` hands on as they are."""
FIELDS: Final = ("forward", "backward", *DEFAULTS)
"""All constructor arguments; each is an attribute of the same name."""


class JobArrayFields:
    """Checked fields that never change; `JobArray` explains them and says what they mean."""

    forward: IntArray
    backward: IntArray
    weight: IntArray | None
    recompute: IntArray
    update: IntArray
    switch: IntArray
    lag_forward: IntArray
    lag_backward: IntArray
    activation: IntArray
    checkpoint: IntArray
    recompute_workspace: IntArray
    weight_memory: IntArray
    state: IntArray
    micro_batches: IntArray
    multiplicity: IntArray
    release: IntArray
    batch_size: IntArray
    place: Place
    memory: IntArray
    devices: tuple[str, ...]
    servers: tuple[str, ...]
    names: tuple[str, ...]
    objective: str
    recompute_mode: str | tuple[bool, ...]
    recompute_as_block: bool
    update_mode: str
    update_blocks_gradient: bool
    microbatch_order: str
    switch_on: str
    trailing_switch: bool
    name: str
    time_unit: str

    def __init__(
        self, forward: npt.ArrayLike, backward: npt.ArrayLike, **fields: Unpack[Fields]
    ) -> None:
        given: dict[str, Any] = {**DEFAULTS, **fields, "forward": forward, "backward": backward}
        refuse_unknown(fields, FIELDS, "a JobArray")
        shape = shape_of(forward)
        checked: dict[str, Any] = {"weight": None}
        for key in PER_STAGE:
            if key != "weight" or given["weight"] is not None:
                checked[key] = table_of(key, given[key], shape)
        for key in PER_CUT:
            checked[key] = table_of(key, given[key], (shape[0], shape[1] - 1), -MAX_INTEGER)
        for key in PER_JOB:
            checked[key] = table_of(key, given[key], shape[:1], 0 if key in MAY_BE_0 else 1)
        check_blocks(checked["micro_batches"], shape[1])
        if given["objective"] == "period":
            check_blocks(checked["micro_batches"], shape[1], checked["multiplicity"])
        checked.update({key: one_of(key, given[key], CHOICES[key]) for key in CHOICES})
        checked.update({key: boolean(key, given[key]) for key in FLAGS})
        checked["name"] = label("name", given["name"])
        checked["recompute_mode"] = recompute_of(given["recompute_mode"], shape[0])
        checked["names"] = names_of("names", given["names"], "job", shape[0])
        checked["place"] = place_of(given["place"], checked["micro_batches"], shape[1])
        devices = (given[key] for key in ("memory", "devices", "servers"))
        checked.update(device_fields(checked["place"], *devices))
        check_together(SimpleNamespace(**checked))
        self.__dict__.update(checked)

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"a JobArray is immutable: make a changed copy, replace({key}=...)")

    def __delattr__(self, key: str) -> None:
        raise AttributeError(f"a JobArray is immutable: {key} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor: copies and unpickled arrays are checked and read-only too
        return _rebuilt, (
            type(self),
            {key: getattr(self, key) for key in FIELDS},
        )

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

    def replace(self, **changes: Any) -> Self:
        """A copy with some constructor arguments changed."""
        refuse_unknown(changes, FIELDS, "a JobArray")
        return type(self)(**{**{key: getattr(self, key) for key in FIELDS}, **changes})

    def without(self, job: int) -> Self:
        """The array without one job."""
        if not 0 <= job < self.n_jobs or self.n_jobs == 1:
            raise InputError(f"job: expected 0..{self.n_jobs - 1} of several jobs, got {job}")
        return self.subset([j for j in range(self.n_jobs) if j != job])

    def subset(self, jobs: Sequence[int]) -> Self:
        """The array of the given jobs only, in that order."""
        rows = jobs_of(jobs, self.n_jobs)
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
        row = self.place[job][microbatch] if not isinstance(self.place[0], int) else self.place
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


def _rebuilt(cls: type[JobArrayFields], fields: dict[str, Any]) -> JobArrayFields:
    return cls(**fields)
