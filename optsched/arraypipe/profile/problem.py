"""From a profile to a `JobArray`: times rounded up to the unit, lags from links, bytes as they are.

The executor hands a gradient over when the whole block is done, update included; so
``update_blocks_gradient`` is on unless asked otherwise.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.memory.budget import standing
from optsched.arraypipe.profile.document import ProfiledJob
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import MAX_NAME, integer, label, one_of
from optsched.pipelines.profiles import bytes_of
from optsched.problems.jobarray.checks import flat, place_of

if TYPE_CHECKING:
    from optsched.arraypipe.profile.document import Profile
    from optsched.problems.jobarray.problem import JobArray


UNITS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
RESERVE: Final = 0.05
"""Share of a device's memory that ``memory="device"`` leaves to fragmentation."""

_KINDS: Final = {"forward": "F", "backward": "B", "recompute": "R", "update": "U"}
_SETTLED: Final = (
    "forward", "backward", "weight", "recompute", "update", "lag_forward", "lag_backward",
    "activation", "checkpoint", "recompute_workspace", "weight_memory", "state", "micro_batches",
    "batch_size", "names", "time_unit", "microbatch_order",
)  # fmt: skip


def job_array(
    profile: Profile,
    jobs: Sequence[Any] | None = None,
    *,
    objective: str = "period",
    recompute_mode: str | Sequence[bool] | None = None,
    update_mode: str | None = None,
    memory: str | int | Sequence[int] | None = None,
    place: Sequence[int] | None = None,
    **options: Any,
) -> JobArray:
    """The job array whose times and bytes a profile says.

    Parameters
    ----------
    profile
        What was measured.
    jobs
        Which jobs: numbers of profiled ones, `Job` objects, or `ProfiledJob` entries of a "what
        if", whose sizes need not have been measured. All profiled ones by default.
    objective
        ``"period"`` (rolling) or ``"makespan"``.
    recompute_mode
        As in `JobArray`; by default as every job is set.
    update_mode
        ``"fused"``, ``"block"`` or ``"global"``; by default ``"global"`` if a job clips gradients
        or has a scheduler that needs a metric, else ``"fused"``.
    memory
        Of a whole device: bytes, ``"80GB"``, ``"device"`` (of the profiled one, less 5 %), or one
        number of bytes per device. The states of all jobs and their gradients are subtracted: what
        is left is for activations. None = unlimited.
    place
        Device of every stage; by default each has its own.
    options
        Others of `JobArray`: ``switch``, ``multiplicity``, ``devices``, ``servers``, ``name``, ...

    Returns
    -------
    JobArray
        Its name ends with the beginning of the profile's hash.

    Raises
    ------
    InputError
        A job's precision was not measured, or the memory does not hold the states.
    """
    from optsched.problems.jobarray.fields import FIELDS
    from optsched.problems.jobarray.problem import JobArray

    known = {*FIELDS} - {*_SETTLED}
    for key in options:
        if key in _SETTLED:
            raise InputError(f"{key}: settled by the profile; change it with problem().replace")
        if key not in known:
            raise InputError(f"{key}: not an option; there are {', '.join(sorted(known))}")
    picked, states = chosen(profile, jobs)
    mode = _update_mode(picked, update_mode)
    placed = place_of(place, np.ones(1, np.int64), profile.n_stages)
    if not isinstance(placed[0], int):
        raise InputError("place: expected one device per stage")
    devices = flat(placed)
    _no_gaps(devices, options)
    _say_extrapolated(profile, picked)
    # what is no block of its own is part of a backward block
    inside = {"update": mode == "fused", "recompute": not options.get("recompute_as_block")}
    times = {
        field: [
            [
                profile.duration_of(kind, s, job.batch, job).median_ns
                + (0 if inside.get(field) else profile.device.block_overhead_ns)
                for s in _stages(profile)
            ]
            for job in picked
        ]
        for field, kind in _KINDS.items()
    }
    unit = _unit([t for rows in times.values() for row in rows for t in row])
    fields: dict[str, Any] = {
        field: [[ceil(t / UNITS[unit]) for t in row] for row in rows]
        for field, rows in times.items()
    }
    fields |= _lags(profile, picked, devices, UNITS[unit]) | _bytes(profile, picked)
    fields["state"] = [[stage.state[name] for stage in profile.stages] for name in states]
    fields["memory"] = _left(profile, memory, fields["state"], picked, mode, devices)
    if recompute_mode is None:
        recompute_mode = [job.recompute for job in picked]
    options.setdefault("update_blocks_gradient", True)
    title = label("name", options.pop("name", f"{len(picked)}x{profile.n_stages}"))
    ending = f" profile {profile.sha256[:16]}"
    return JobArray(
        **fields,
        micro_batches=[job.microbatches for job in picked],
        batch_size=[job.batch_size for job in picked],
        names=[job.name for job in picked],
        name=title[: MAX_NAME - len(ending)] + ending,
        objective=objective,
        recompute_mode=recompute_mode,
        update_mode=mode,
        place=place,
        time_unit=unit,
        **options,
    )


def chosen(profile: Profile, jobs: Sequence[Any] | None) -> tuple[list[ProfiledJob], list[str]]:
    """The jobs, and per job the profiled one whose model state it has."""
    if jobs is None:
        return list(profile.jobs), [job.name for job in profile.jobs]
    if isinstance(jobs, (str, bytes)) or not isinstance(jobs, Sequence) or not len(jobs):
        raise InputError(f"jobs: expected a list of jobs or their numbers, got {jobs!r:.60}")
    picked, states = [], []
    copies: Counter[int] = Counter()
    taken = {job.name for job in profile.jobs}
    for k, given in enumerate(jobs):
        place = f"jobs[{k}]: "
        if isinstance(given, (int, np.integer)):
            number = integer(place[:-2], given, 0, len(profile.jobs) - 1)
            job = like = profile.jobs[number]
            copies[number] += 1
            if copies[number] > 1:
                job = _copy(job, copies[number], taken)
        elif hasattr(given, "batch_size") and hasattr(given, "microbatches"):
            job, like = _described(profile, given, k)
        else:
            raise InputError(f"{place}expected a job or its number, got {given!r:.60}")
        picked.append(job)
        states.append(like.name)
    return picked, states


def _copy(job: ProfiledJob, number: int, taken: set[str]) -> ProfiledJob:
    """The same job under a name that no other has."""
    name = f"{job.name[: MAX_NAME - 20]} ({number})"
    while name in taken:
        number += 1
        name = f"{job.name[: MAX_NAME - 20]} ({number})"
    taken.add(name)
    return msgspec.structs.replace(job, name=name)


def _described(profile: Profile, given: Any, k: int) -> tuple[ProfiledJob, ProfiledJob]:
    """A job by its settings, and the profiled one that is most like it.

    The optimizer of a `Job` is a function, which says nothing: the job of the same name tells it,
    else of those in its precision the one whose updates take longest.
    """
    name = getattr(given, "name", "") or f"job{k}"
    batch_size = integer(f"jobs[{k}].batch_size", given.batch_size, 1, MAX_INTEGER)
    parts = integer(f"jobs[{k}].microbatches", given.microbatches, 1, batch_size)
    precision = getattr(given, "precision", "fp32")
    same = [job for job in profile.jobs if job.precision == precision]
    if not same:
        raise InputError(f"jobs[{k}].precision: {precision} was not measured")
    told = getattr(given, "optimizer", None)
    if isinstance(told, str) and told:
        known = sorted({job.optimizer for job in same})
        same = [job for job in same if job.optimizer == told]
        if not same:
            raise InputError(
                f"jobs[{k}].optimizer: {format_json(told)} was not measured; there are "
                f"{', '.join(known)}"
            )
    like = next((job for job in same if job.name == name), None) or max(
        same,
        key=lambda job: sum(
            profile.duration_of("U", s, 1, job).median_ns for s in _stages(profile)
        ),
    )
    update = getattr(given, "update", like.update if like.name == name else "fused")
    job = ProfiledJob(
        name=name,
        batch_size=batch_size,
        microbatches=parts,
        recompute=bool(getattr(given, "recompute", False)),
        precision=like.precision,
        optimizer=like.optimizer,
        update="global" if getattr(given, "clip_norm", None) is not None else update,
    )
    return job, like


def _no_gaps(devices: Sequence[int], options: dict[str, Any]) -> None:
    """Devices without a stage are there only if they are named."""
    empty = sorted({*range(max(devices))} - {*devices})
    if empty and options.get("devices") is None:
        raise InputError(
            f"place: device {empty[0]} has no stage; say devices 0..{len(set(devices)) - 1}, "
            f"or name all {1 + max(devices)} with devices="
        )


def _update_mode(jobs: Sequence[ProfiledJob], given: str | None) -> str:
    together = [job.name for job in jobs if job.update == "global"]
    if given is None:
        return "global" if together else "fused"
    one_of("update_mode", given, ("fused", "block", "global"))
    if together and given != "global":
        raise InputError(
            f"update_mode: job {together[0]} clips gradients or has a scheduler that needs a "
            f'metric, expected "global", got "{given}"'
        )
    return given


def _say_extrapolated(profile: Profile, jobs: Sequence[ProfiledJob]) -> None:
    for job in jobs:
        if profile.extrapolates(job.batch, job.precision):
            sizes = profile.sizes(job.precision)
            warnings.warn(
                f"job {job.name}: micro-batch {job.batch} lies outside the measured sizes "
                f"{sizes[0]}..{sizes[-1]}: its times are extrapolated",
                stacklevel=4,
            )


def _unit(times: Sequence[int]) -> str:
    """The coarser of us and ns in which the shortest block has three digits."""
    return "us" if min(times) >= 100 * UNITS["us"] else "ns"


def _lags(
    profile: Profile, jobs: Sequence[ProfiledJob], devices: Sequence[int], unit: int
) -> dict[str, Any]:
    """Time over the link for what crosses every cut; nothing within a device."""
    link = profile.links.activation
    cuts = range(profile.n_stages - 1)
    found: dict[str, Any] = {}
    for field, what in (("lag_forward", "output"), ("lag_backward", "gradient")):
        rows = [
            [
                0
                if devices[s] == devices[s + 1]
                else ceil(link.time_ns(profile.bytes_of(what, s, job.batch, job.precision)) / unit)
                for s in cuts
            ]
            for job in jobs
        ]
        found[field] = np.array(rows, np.int64).reshape(len(jobs), len(cuts))
    return found


def _bytes(profile: Profile, jobs: Sequence[ProfiledJob]) -> dict[str, Any]:
    """Bytes kept from F to B; a recomputing block needs the rest of them while it runs."""
    kept, inputs = (
        np.array(
            [[profile.bytes_of(what, s, j.batch, j.precision) for s in _stages(profile)]
             for j in jobs],
            np.int64,
        )
        for what in ("saved", "input")
    )  # fmt: skip
    return {
        "activation": kept,
        "checkpoint": inputs,
        "recompute_workspace": np.maximum(kept - inputs, 0),
    }


def _left(
    profile: Profile,
    memory: str | int | Sequence[int] | None,
    states: Sequence[Sequence[int]],
    jobs: Sequence[ProfiledJob],
    update_mode: str,
    devices: Sequence[int],
) -> list[int] | None:
    """Bytes left for activations on every device."""
    if memory is None:
        return None
    count = 1 + max(devices)
    there = _bytes_there(profile, memory, count)
    # with one micro-batch and a fused update a gradient lives in its own block only
    alone = update_mode == "fused" and all(job.microbatches == 1 for job in jobs)
    on = np.eye(count, dtype=np.int64)[list(devices)]  # by stage and device
    held = np.array(states, np.int64) @ on
    gradients = np.array([[stage.gradients_bytes for stage in profile.stages]] * len(jobs)) @ on
    left = np.array(there, np.int64) - standing(held, gradients, alone)
    if left.min() <= 0:  # 0 would read as unlimited
        d = int(left.argmin())
        fit = jobs_that_fit(
            len(jobs), lambda n: standing(held[:n], gradients[:n], alone)[d] < there[d]
        )
        raise InputError(
            f"memory: device {d} has {there[d]} bytes, the states of {len(jobs)} jobs and their "
            f"gradients take {there[d] - left[d]} there; at most {fit} jobs would fit"
        )
    found: list[int] = left.tolist()
    return found


def _bytes_there(profile: Profile, memory: str | int | Sequence[int], count: int) -> Sequence[int]:
    if memory == "device":
        if not profile.device.memory_bytes:
            raise InputError(
                f"memory: the profile does not know how much {profile.device.name} has; say "
                f'bytes, or a size such as "80GB"'
            )
        return [int(profile.device.memory_bytes * (1 - RESERVE))] * count
    if isinstance(memory, (str, int, np.integer)):
        return [bytes_of(memory)] * count
    if not isinstance(memory, (Sequence, np.ndarray)) or len(memory) != count:
        raise InputError(f"memory: expected bytes of {count} devices, got {memory!r:.60}")
    return [integer(f"memory[{d}]", b, 1, MAX_INTEGER) for d, b in enumerate(memory)]


def _stages(profile: Profile) -> range:
    return range(profile.n_stages)
