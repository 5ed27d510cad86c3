"""From a profile to a `JobArray`: which jobs, which options, and what memory the states leave."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.memory.budget import standing
from optsched.arraypipe.profile.costs import Costs, array_fields, costs_of
from optsched.arraypipe.profile.document import ProfiledJob
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.text import NANOSECONDS
from optsched.io.values import MAX_NAME, integer, label
from optsched.pipelines.profiles import bytes_of
from optsched.problems.jobarray.checks import row_of

if TYPE_CHECKING:
    from optsched.arraypipe.profile.document import Profile
    from optsched.problems.jobarray.problem import JobArray


RESERVE: Final = 0.05
"""Share of a device's memory that ``memory="device"`` leaves to fragmentation."""

_SETTLED: Final = ("weight", "weight_memory", "microbatch_order")  # and all that is measured


def job_array(
    profile: Profile,
    jobs: Sequence[Any] | None,
    memory: str | int | Sequence[int] | None,
    options: dict[str, Any],
) -> JobArray:
    """The job array whose times and bytes a profile says (`Profile.problem`)."""
    from optsched.problems.jobarray.problem import JobArray

    picked, states = chosen(profile, jobs)
    mode = options["update_mode"] = _update_mode(picked, options["update_mode"])
    n = profile.n_stages
    devices = range(n) if options["place"] is None else row_of("place", options["place"], n)
    empty = sorted({*range(max(devices))} - {*devices})
    if empty and options.get("devices") is None:
        raise InputError(
            f"place: device {empty[0]} has no stage; say devices 0..{len(set(devices)) - 1}, "
            f"or name all {1 + max(devices)} with devices="
        )
    overhead_ns = profile.device.block_overhead_ns
    costs = []
    for job, state in zip(picked, states, strict=True):
        if profile.extrapolates(job.batch, job.precision):
            sizes = profile.sizes(job.precision)
            warnings.warn(
                f"job {job.name}: micro-batch {job.batch} lies outside the measured sizes "
                f"{sizes[0]}..{sizes[-1]}: its times are extrapolated",
                stacklevel=3,
            )
        one = costs_of(profile, job, state, job.batch).merged(range(n + 1), overhead_ns)
        # what is no block of its own is part of a backward block
        one.update_ns[:] += overhead_ns * (mode != "fused")
        one.recompute_ns[:] += overhead_ns * bool(options.get("recompute_as_block"))
        costs.append(one)
    times = ((c.forward_ns, c.backward_ns, c.recompute_ns, c.update_ns) for c in costs)
    shortest_ns = min(row.min() for one in times for row in one)
    unit = "us" if shortest_ns >= 100 * NANOSECONDS["us"] else "ns"  # it keeps three digits
    fields = array_fields(costs, profile.links.activation, devices, NANOSECONDS[unit])
    fields |= {
        "micro_batches": [job.microbatches for job in picked],
        "batch_size": [job.batch_size for job in picked],
        "names": [job.name for job in picked],
        "time_unit": unit,
    }
    for key in options:
        if key in fields or key in _SETTLED:
            raise InputError(f"{key}: settled by the profile; change it with problem().replace")
    if memory is not None:
        # with one micro-batch and a fused update a gradient lives in its own block only
        alone = mode == "fused" and all(job.microbatches == 1 for job in picked)
        fields["memory"] = _left(profile, memory, costs, alone, devices)
    if options["recompute_mode"] is None:
        options["recompute_mode"] = [job.recompute for job in picked]
    title = label("name", options.pop("name", f"{len(picked)}x{n}"))
    ending = f" profile {profile.sha256[:16]}"
    name = title[: MAX_NAME - len(ending)] + ending
    return JobArray(**{"update_blocks_gradient": True} | fields | options, name=name)


def chosen(
    profile: Profile, jobs: Sequence[Any] | None
) -> tuple[list[ProfiledJob], list[tuple[int, ...]]]:
    """The jobs, and the bytes of each one's state on every stage."""
    known = profile.jobs
    if jobs is None:
        jobs = range(len(known))
    if isinstance(jobs, (str, bytes)) or not isinstance(jobs, Sequence) or not len(jobs):
        raise InputError(f"jobs: expected a list of jobs or their numbers, got {jobs!r:.60}")
    picked: list[ProfiledJob] = []
    states = []
    taken: set[str] = set()
    for k, given in enumerate(jobs):
        if isinstance(given, (int, np.integer)):
            like = known[integer(f"jobs[{k}]", given, 0, len(known) - 1)]
            name, number = like.name, 1
            while name in taken:  # once more the same job
                number += 1
                name = f"{like.name[: MAX_NAME - 20]} ({number})"
            taken.add(name)
            job = msgspec.structs.replace(like, name=name)
        elif hasattr(given, "batch_size") and hasattr(given, "microbatches"):
            job, like = _described(profile, given, k)
        else:
            raise InputError(f"jobs[{k}]: expected a job or its number, got {given!r:.60}")
        picked.append(job)
        j = known.index(like)
        states.append(tuple(stage.state[j] for stage in profile.stages))
    return picked, states


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
        known = ", ".join(sorted({job.optimizer for job in same}))
        same = [job for job in same if job.optimizer == told]
        if not same:
            raise InputError(
                f"jobs[{k}].optimizer: {format_json(told)} was not measured; there are {known}"
            )

    def updates(job: ProfiledJob) -> int:
        stages = range(profile.n_stages)
        return sum(profile.duration_of("U", s, 1, job).median_ns for s in stages)

    like = next((job for job in same if job.name == name), None) or max(same, key=updates)
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


def _update_mode(jobs: Sequence[ProfiledJob], given: str | None) -> str:
    together = [job.name for job in jobs if job.update == "global"]
    if together and given not in (None, "global"):
        raise InputError(
            f"update_mode: job {together[0]} clips gradients or has a scheduler that needs a "
            f'metric, expected "global", got {format_json(given)}'
        )
    return given or ("global" if together else "fused")


def _left(
    profile: Profile,
    memory: str | int | Sequence[int],
    costs: Sequence[Costs],
    alone: bool,
    devices: Sequence[int],
) -> list[int]:
    """Bytes left for activations on every device."""
    count = 1 + max(devices)
    there = _bytes_there(profile, memory, count)
    on = np.eye(count, dtype=np.int64)[list(devices)]  # by stage and device
    held, gradients = (
        np.array([getattr(one, key) for one in costs]) @ on for key in ("state", "gradients")
    )
    left = np.array(there, np.int64) - standing(held, gradients, alone)
    if left.min() <= 0:  # 0 would read as unlimited
        d, n_jobs = int(left.argmin()), len(costs)
        fit = jobs_that_fit(
            n_jobs, lambda n: standing(held[:n], gradients[:n], alone)[d] < there[d]
        )
        raise InputError(
            f"memory: device {d} has {there[d]} bytes, the states of {n_jobs} jobs and their "
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
