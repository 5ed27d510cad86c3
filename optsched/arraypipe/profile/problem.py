"""From a profile to a `JobArray`: times, lags and bytes of the chosen jobs, and the memory left."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.profile.document import Link, ProfiledJob
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.text import NANOSECONDS
from optsched.io.values import bytes_of, integer
from optsched.problems.jobarray.checks import row_of

if TYPE_CHECKING:
    from optsched.arraypipe.profile.document import BlockEntry, Profile
    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.problem import JobArray


RESERVE: Final = 0.05
"""Share of a device's memory that ``memory="device"`` leaves to fragmentation."""

_SETTLED: Final = ("micro_batches", "batch_size", "names", "time_unit", "weight", "weight_memory")


def job_array(profile: Profile, jobs: Sequence[Any] | None, options: dict[str, Any]) -> JobArray:
    """Make the job array of a profile's times and bytes (`Profile.problem`)."""
    from optsched.problems.jobarray.problem import JobArray

    chosen = chosen_jobs(profile, jobs)
    picked = [job for job, _ in chosen]
    memory, split = options.pop("memory", None), options.pop("split_backward", False)
    link, devices = options.pop("link", profile.link), _devices(profile, options)
    if link is not None and not isinstance(link, Link):
        raise InputError(f"link: expected a Link(bandwidth=..., latency_ns=...), got {link!r:.60}")
    table = [[profile.block(s, job.batch, job.precision) for s in range(profile.n_stages)]
             for job in picked]  # fmt: skip
    times = _times(profile, picked, table, split)
    unit = "us" if min(row.min() for row in times.values()) >= 100_000 else "ns"
    size = NANOSECONDS[unit]
    fields: dict[str, Any] = {key: -(-row // size) for key, row in times.items()}
    fields |= _lags(link, table, devices, size) | _bytes(table, split)
    for key in options:
        if key in fields or key in _SETTLED:
            raise InputError(f"{key}: settled by the profile; change it with problem().replace")
    fields["state"] = np.array([state for _, state in chosen])
    if memory is not None:
        fields["memory"] = _memory_left(profile, memory, picked, fields["state"], devices)
    given: dict[str, Any] = {
        "objective": "period",
        "update_mode": update_mode(picked, options.pop("update_mode", None)),
        "update_blocks_gradient": True,
        "name": f"{len(picked)}x{profile.n_stages}",
        "recompute_mode": options.pop("recompute_mode", None) or [job.recompute for job in picked],
        "micro_batches": [job.microbatches for job in picked],
        "batch_size": [job.batch_size for job in picked],
        "names": [job.name for job in picked],
        "time_unit": unit,
    }
    return JobArray(**given | fields | options)


def chosen_jobs(
    profile: Profile, jobs: Sequence[Any] | None
) -> list[tuple[ProfiledJob, tuple[int, ...]]]:
    """The jobs with the bytes of the state of each on every stage; names are distinct."""
    if jobs is None:
        jobs = range(len(profile.jobs))
    if isinstance(jobs, (str, bytes)) or not isinstance(jobs, Sequence) or not len(jobs):
        raise InputError(f"jobs: expected a list of jobs or their numbers, got {jobs!r:.60}")
    found: list[tuple[ProfiledJob, tuple[int, ...]]] = []
    for k, given in enumerate(jobs):
        if isinstance(given, (int, np.integer)):
            job = like = profile.jobs[integer(f"jobs[{k}]", given, 0, len(profile.jobs) - 1)]
        elif hasattr(given, "batch_size") and hasattr(given, "microbatches"):
            job, like = _described(profile, given, k)
        else:
            raise InputError(f"jobs[{k}]: expected a job or its number, got {given!r:.60}")
        copies = sum(one.name.partition(" (")[0] == job.name for one, _ in found)
        name = f"{job.name} ({copies + 1})" if copies else job.name
        j = profile.jobs.index(like)
        state = tuple(stage.state[j] for stage in profile.stages)
        found.append((msgspec.structs.replace(job, name=name), state))
    return found


def _described(profile: Profile, given: Any, k: int) -> tuple[ProfiledJob, ProfiledJob]:
    """A job by its settings, and the profiled job that gives its optimizer and state.

    That is the job of the same name; otherwise the one in its precision with the slowest updates.
    """
    name, precision = given.name or f"job{k}", getattr(given, "precision", "fp32")
    batch_size = integer(f"jobs[{k}].batch_size", given.batch_size, 1, MAX_INTEGER)
    parts = integer(f"jobs[{k}].microbatches", given.microbatches, 1, batch_size)
    same = [job for job in profile.jobs if job.precision == precision]
    if isinstance(given, ProfiledJob) and given.optimizer:
        same = [job for job in same if job.optimizer == given.optimizer]
    if not same:
        measured = sorted({f"{job.optimizer} in {job.precision}" for job in profile.jobs})
        raise InputError(f"jobs[{k}]: was not measured; measured are {', '.join(measured)}")

    def update_ns(job: ProfiledJob) -> int:
        return sum(profile.update(s, job).median_ns for s in range(profile.n_stages))

    like = next((job for job in same if job.name == name), None) or max(same, key=update_ns)
    update = getattr(given, "update", like.update if like.name == name else "fused")
    job = msgspec.structs.replace(
        like, name=name, batch_size=batch_size, microbatches=parts,
        recompute=bool(getattr(given, "recompute", False)),
        update="global" if getattr(given, "needs_norm", False) else update,
    )  # fmt: skip
    return job, like


def update_mode(jobs: Sequence[ProfiledJob], given: str | None) -> str:
    """``"global"`` if a job needs the gradients of all stages; refuses another given mode then."""
    together = [job.name for job in jobs if job.update == "global"]
    if together and given not in (None, "global"):
        raise InputError(
            f"update_mode: job {together[0]} clips gradients or has a scheduler that needs a "
            f'metric, expected "global", got {format_json(given)}'
        )
    return given or ("global" if together else "fused")


def _devices(profile: Profile, options: dict[str, Any]) -> list[int]:
    """Device of every stage; refuses numbers that leave a device without a stage."""
    n, place = profile.n_stages, options.get("place")
    if place is None:
        options.pop("place", None)
        return [*range(n)]
    devices: list[int] = list(row_of("place", place, n))
    empty = sorted({*range(max(devices))} - {*devices})
    if empty and options.get("devices") is None:
        raise InputError(
            f"place: device {empty[0]} has no stage; give devices 0..{len(set(devices)) - 1}, "
            f"or name all {1 + max(devices)} with devices="
        )
    return devices


def _times(
    profile: Profile,
    jobs: Sequence[ProfiledJob],
    table: Sequence[Sequence[BlockEntry]],
    split: bool,
) -> dict[str, IntArray]:
    """Medians in nanoseconds; shape (K, S)."""
    kinds = {"forward": "forward", "backward": "backward", "recompute": "recompute"}
    if split:
        if any(b.weight is None or b.input_gradient is None for row in table for b in row):
            raise InputError("split_backward: the profile has no times of blocks I and W")
        kinds |= {"backward": "input_gradient", "weight": "weight"}
    found = {
        key: np.array([[getattr(b, kind).median_ns for b in row] for row in table], np.int64)
        for key, kind in kinds.items()
    }
    stages = range(profile.n_stages)
    updates = [[profile.update(s, job).median_ns for s in stages] for job in jobs]
    return found | {"update": np.array(updates, np.int64)}


def _lags(
    link: Link | None, table: Sequence[Sequence[BlockEntry]], devices: Sequence[int], unit_ns: int
) -> dict[str, IntArray]:
    """Times of messages between neighbouring stages; 0 on one device, and without a link."""

    def lags(size: str) -> IntArray:
        sent = [
            [
                ceil(link.time_ns(getattr(b, size)) / unit_ns) if link and here != after else 0
                for b, here, after in zip(row, devices, devices[1:], strict=False)
            ]
            for row in table
        ]
        return np.array(sent, np.int64).reshape(len(table), -1)

    return {"lag_forward": lags("output_bytes"), "lag_backward": lags("gradient_bytes")}


def _bytes(table: Sequence[Sequence[BlockEntry]], split: bool) -> dict[str, IntArray]:
    saved, inputs, until_weight = (
        np.array([[getattr(b, key) for b in row] for row in table], np.int64)
        for key in ("saved_bytes", "input_bytes", "weight_bytes")
    )
    workspace = np.maximum(saved - inputs, 0)
    found = {"activation": saved, "checkpoint": inputs, "recompute_workspace": workspace}
    return found | ({"weight_memory": until_weight} if split else {})


def standing_bytes(
    profile: Profile, jobs: Sequence[ProfiledJob], state: Sequence[Sequence[int]]
) -> list[int]:
    """Bytes of every stage that are held all along: states, gradients, shared tensors.

    `state` has the bytes of every job, by stage. With one micro-batch and a fused update a
    gradient lives in its block only, so that a stage holds one at a time.
    """
    in_turn = all(job.microbatches == 1 and job.update != "global" for job in jobs)
    gradients = 1 if in_turn else len(jobs)
    return [
        sum(states) + gradients * stage.gradients_bytes + stage.shared_bytes
        for stage, states in zip(profile.stages, state, strict=True)
    ]


def _memory_left(
    profile: Profile,
    memory: Any,
    jobs: Sequence[ProfiledJob],
    states: IntArray,
    devices: Sequence[int],
) -> list[int]:
    """Bytes left for activations on every device; refuses a device that is too small."""
    limits = memory_of(profile, memory, 1 + max(devices))

    def held(n: int, device: int) -> int:
        rows = standing_bytes(profile, jobs[:n], states[:n].T.tolist())
        return sum(row for row, d in zip(rows, devices, strict=True) if d == device)

    left = [limit - held(len(jobs), d) for d, limit in enumerate(limits)]
    if min(left) <= 0:  # 0 would read as unlimited
        d, n_jobs = left.index(min(left)), len(jobs)
        fit = jobs_that_fit(n_jobs, lambda n: held(n, d) < limits[d])
        raise InputError(
            f"memory: device {d} has {limits[d]} bytes, the states of {n_jobs} jobs and their "
            f"gradients take {limits[d] - left[d]}; at most {fit} jobs would fit"
        )
    return left


def memory_of(profile: Profile, memory: Any, count: int) -> Sequence[int]:
    """Bytes of every device."""
    if memory == "device":
        if not profile.device.memory_bytes:
            raise InputError(
                f"memory: that of {profile.device.name} is unknown; give bytes, or a size such "
                'as "80GB"'
            )
        return [int(profile.device.memory_bytes * (1 - RESERVE))] * count
    if isinstance(memory, (str, int, np.integer)):
        return [bytes_of(memory if isinstance(memory, str) else int(memory))] * count
    if not isinstance(memory, (Sequence, np.ndarray)) or len(memory) != count:
        raise InputError(f"memory: expected bytes of {count} devices, got {memory!r:.60}")
    return [integer(f"memory[{d}]", b, 1, MAX_INTEGER) for d, b in enumerate(memory)]
