"""The fields of a job array: one table of their kinds, defaults and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypedDict,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import boolean, integer, label, labels, one_of, refuse_unknown
from optsched.model.objectives import MAKESPAN, OBJECTIVES, PERIOD, goal_of
from optsched.problems.jobarray.checks import (
    Place,
    check_blocks,
    check_together,
    device_fields,
    jobs_of,
    place_of,
    recompute_of,
    shape_of,
    table_of,
)

if TYPE_CHECKING:
    from typing import Self, Unpack

    from optsched.model.schedule import Goal, IntArray

Names = Sequence[str] | None


class Field(NamedTuple):
    """Kind, default and range of an argument of `JobArray`.

    Tables have a value per job, per job and stage, or per job and cut between two stages.
    """

    kind: Literal["job", "stage", "cut", "option", "label"]
    default: Any = 0
    least: int = 0
    choices: tuple[str, ...] = ()


def _choice(kind: Literal["option", "label"], *choices: str) -> Field:
    return Field(kind, choices[0], choices=choices)


_STAGE: Final = Field("stage")
_CUT: Final = Field("cut", least=-MAX_INTEGER)
_FLAG: Final = Field("option", False)
_NAMES: Final = Field("label", None)


class Fields(TypedDict, total=False):
    """Arguments of `JobArray` besides forward and backward times."""

    micro_batches: Annotated[npt.ArrayLike, Field("job", 1, 1)]
    multiplicity: Annotated[npt.ArrayLike, Field("job", 1, 1)]
    release: Annotated[npt.ArrayLike, Field("job")]
    batch_size: Annotated[npt.ArrayLike, Field("job")]
    job_weight: Annotated[npt.ArrayLike, Field("job", 1)]
    due: Annotated[npt.ArrayLike, Field("job")]
    weight: Annotated[npt.ArrayLike | None, Field("stage", None)]
    recompute: Annotated[npt.ArrayLike, _STAGE]
    update: Annotated[npt.ArrayLike, _STAGE]
    switch: Annotated[npt.ArrayLike, _STAGE]
    lag_forward: Annotated[npt.ArrayLike, _CUT]
    lag_backward: Annotated[npt.ArrayLike, _CUT]
    activation: Annotated[npt.ArrayLike, _STAGE]
    checkpoint: Annotated[npt.ArrayLike, _STAGE]
    recompute_workspace: Annotated[npt.ArrayLike, _STAGE]
    weight_memory: Annotated[npt.ArrayLike, _STAGE]
    state: Annotated[npt.ArrayLike, _STAGE]
    objective: Annotated[str, _choice("option", *OBJECTIVES, PERIOD)]
    recompute_mode: Annotated[str | Sequence[bool], Field("option", "never")]
    recompute_as_block: Annotated[bool, _FLAG]
    update_mode: Annotated[str, _choice("option", "fused", "block", "global", "none")]
    update_blocks_gradient: Annotated[bool, _FLAG]
    microbatch_order: Annotated[str, _choice("option", "fixed", "free")]
    trailing_switch: Annotated[bool, _FLAG]
    place: Annotated[Sequence[Any] | None, _NAMES]
    memory: Annotated[npt.ArrayLike | None, _NAMES]
    devices: Annotated[Names, _NAMES]
    servers: Annotated[Names, _NAMES]
    names: Annotated[Names, _NAMES]
    name: Annotated[str, Field("label", "")]
    time_unit: Annotated[str, _choice("label", "us", "ns", "ms", "s")]


FIELDS: Final[dict[str, Field]] = {
    "forward": Field("stage", None),
    "backward": Field("stage", None),
    **{
        key: hint.__metadata__[0]
        for key, hint in get_type_hints(Fields, include_extras=True).items()
    },
}
"""All constructor arguments; each is an attribute of the same name."""


def fields_of(*kinds: str) -> list[str]:
    """Return the fields of these kinds."""
    return [key for key, field in FIELDS.items() if field.kind in kinds]


class JobArrayFields:
    """Checked, immutable fields; `JobArray` explains them."""

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
    job_weight: IntArray
    due: IntArray
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
    trailing_switch: bool
    name: str
    time_unit: str

    def __init__(
        self, forward: npt.ArrayLike, backward: npt.ArrayLike, **fields: Unpack[Fields]
    ) -> None:
        refuse_unknown(fields, FIELDS, "a JobArray")
        given: dict[str, Any] = {key: field.default for key, field in FIELDS.items()}
        given |= {"forward": forward, "backward": backward, **fields}
        shape = shape_of(forward)
        shapes = {"stage": shape, "cut": (shape[0], shape[1] - 1), "job": shape[:1]}
        checked: dict[str, Any] = {}
        for key, field in FIELDS.items():
            value = given[key]
            if field.kind in shapes:
                absent = key == "weight" and value is None
                table = None if absent else table_of(key, value, shapes[field.kind], field.least)
                checked[key] = table
            elif field.choices:
                checked[key] = one_of(key, value, field.choices)
            elif field.default is False:
                checked[key] = boolean(key, value)
        counts = checked["micro_batches"].tolist()
        check_blocks("micro_batches", counts, shape[1])
        if given["objective"] == "period":  # Python integers: the products may overflow
            copies = zip(counts, checked["multiplicity"].tolist(), strict=True)
            check_blocks("multiplicity", [m * n for m, n in copies], shape[1])
        checked["name"] = label("name", given["name"])
        checked["recompute_mode"] = recompute_of(given["recompute_mode"], shape[0])
        checked["names"] = labels("names", given["names"], shape[0], "job")
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
        return _rebuilt, (type(self), {key: getattr(self, key) for key in FIELDS})

    @property
    def goal(self) -> Goal:
        """Objective of one iteration, with weights and due dates."""
        name = MAKESPAN if self.objective == PERIOD else self.objective
        return goal_of(self.n_jobs, name, self.job_weight, self.due)

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
        """Return a copy with some constructor arguments changed."""
        refuse_unknown(changes, FIELDS, "a JobArray")
        return type(self)(**{**{key: getattr(self, key) for key in FIELDS}, **changes})

    def without(self, job: int) -> Self:
        """Return the array without one job."""
        if self.n_jobs == 1:
            raise InputError(f"job: expected one of several jobs, got {job!r:.60} of one job")
        index = integer("job", job, 0, self.n_jobs - 1)
        return self.subset([j for j in range(self.n_jobs) if j != index])

    def subset(self, jobs: Sequence[int]) -> Self:
        """Return the array of the given jobs only, in that order."""
        rows = jobs_of(jobs, self.n_jobs)
        changes: dict[str, Any] = {
            key: None if getattr(self, key) is None else getattr(self, key)[rows]
            for key in fields_of("job", "stage", "cut")
        }
        changes["names"] = [self.names[j] for j in rows]
        if not isinstance(self.recompute_mode, str):
            changes["recompute_mode"] = [self.recompute_mode[j] for j in rows]
        if not isinstance(self.place[0], int):
            changes["place"] = [self.place[j] for j in rows]
        return self.replace(**changes)

    def devices_of(self, job: int, microbatch: int = 0) -> IntArray:
        """Return the device of every virtual stage for a micro-batch of a job; shape (V,)."""
        row = self.place[job][microbatch] if not isinstance(self.place[0], int) else self.place
        return np.array(row, np.int64)

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """Which jobs recompute; `InputError` for ``recompute_mode="choose"``."""
        if self.recompute_mode == "choose":
            raise InputError(
                'recompute_mode is "choose": give graph(recompute=[...]), or replace it by '
                '"never", "always" or one bool per job'
            )
        if isinstance(self.recompute_mode, str):
            return (self.recompute_mode == "always",) * self.n_jobs
        return self.recompute_mode


def _rebuilt(cls: type[JobArrayFields], fields: dict[str, Any]) -> JobArrayFields:
    return cls(**fields)
