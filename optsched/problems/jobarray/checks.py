"""Checked arrays, names and places of a `JobArray`; refusals name field, index and value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import frozen, int_array, integer, label, labels, listed
from optsched.model.objectives import MAKESPAN, PERIOD, check_sums, goal_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

Place: TypeAlias = "tuple[int, ...] | tuple[tuple[tuple[int, ...], ...], ...]"

MAX_BLOCKS: Final = 2_000_000
"""Jobs x micro-batches x stages: beyond, no graph fits into memory."""

RECOMPUTE_MODES: Final = ("never", "always", "choose")


def shape_of(forward: npt.ArrayLike) -> tuple[int, int]:
    """Return (jobs, stages) of the forward times."""
    array = int_array("forward", forward, None)
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(
            f"forward: expected one row per job with one value per stage, got shape {array.shape}"
        )
    return int(array.shape[0]), int(array.shape[1])


def table_of(key: str, values: Any, shape: tuple[int, ...], least: int = 0) -> IntArray:
    """Check an array of the given shape with values in least..2^53; a scalar fills it."""
    array: IntArray = int_array(key, values, None)
    if array.ndim == 0:
        array = np.full(shape, array)
    if array.shape != shape:
        raise InputError(f"{key}: expected shape {shape}, got {array.shape}")
    refuse(array < least, key, array, f"an integer >= {least}")
    refuse(array > MAX_INTEGER, key, array, "an integer <= 2^53")
    return frozen(array)


def refuse(bad: npt.NDArray[np.bool_], key: str, values: IntArray, rule: str) -> None:
    """Raise for the first bad value, by its place."""
    if not bad.any():
        return
    at = [int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape)]
    where = f"devices[{at[0]}].{key}" if key == "memory" else f"jobs[{at[0]}].{key}"
    where += "".join(f"[{k}]" for k in at[1:])
    raise InputError(f"{where}: expected {rule}, got {values[tuple(at)]}")


def check_blocks(key: str, counts: list[int], n_stages: int) -> None:
    """Refuse arrays that no graph can hold: a typing error would otherwise fill the memory."""
    total = sum(counts) * n_stages
    if total > MAX_BLOCKS:
        j = max(range(len(counts)), key=counts.__getitem__)
        raise InputError(
            f"jobs[{j}].{key}: all blocks of a cycle may be at most {MAX_BLOCKS}, got {total} "
            f"({counts[j]} micro-batches of job {j} on {n_stages} stages)"
        )


def flat(place: Place) -> list[int]:
    """Return all devices named in a place."""
    if isinstance(place[0], int):
        return list(place)
    return [d for job in place for row in job for d in row]


def recompute_of(given: str | Sequence[bool], n_jobs: int) -> str | tuple[bool, ...]:
    """Check one of the modes, or one bool per job."""
    if isinstance(given, str):
        if given not in RECOMPUTE_MODES:
            raise InputError(
                f"recompute_mode: expected one of {', '.join(RECOMPUTE_MODES)} or one bool "
                f"per job, got {format_json(given)}"
            )
        return given
    chosen = tuple(given) if isinstance(given, Iterable) else ()
    if len(chosen) != n_jobs or not all(isinstance(c, (bool, np.bool_)) for c in chosen):
        raise InputError(f"recompute_mode: expected {n_jobs} times true or false, one per job")
    return tuple(bool(c) for c in chosen)


def place_of(given: Any, micro_batches: IntArray, n_stages: int) -> Place:
    """Check a device per stage, or per job, micro-batch and stage."""
    if given is None:
        return tuple(range(n_stages))
    rows = listed("place", given, "one device per stage")
    if not rows or isinstance(rows[0], (int, np.integer)):
        return row_of("place", rows, n_stages)
    nested = []
    listed("place", rows, "one entry per job", len(micro_batches))
    for j, (job, count) in enumerate(zip(rows, micro_batches.tolist(), strict=True)):
        given_rows = enumerate(listed(f"place[{j}]", job, "one row per micro-batch", count))
        nested.append(tuple(row_of(f"place[{j}][{m}]", row, n_stages) for m, row in given_rows))
    return tuple(nested)


def row_of(where: str, row: Any, n_stages: int) -> tuple[int, ...]:
    """Check one device per stage."""
    devices = enumerate(listed(where, row, "one device per stage", n_stages))
    return tuple(integer(f"{where}[{v}]", device, 0, 1_000_000) for v, device in devices)


def device_fields(place: Place, memory: Any, devices: Any, servers: Any) -> dict[str, Any]:
    """Check names, servers and memory of the devices; refuse a stage without a device."""
    used = 1 + max(flat(place))
    known = devices if devices is not None else servers
    key = "servers" if devices is None else "devices"
    capacity = 0 if memory is None else memory
    count = used if known is None else len(listed(key, known, "a list of names"))
    if known is None and np.ndim(capacity) == 1:
        count = len(np.asarray(capacity))
    if used > count:
        raise InputError(f"place: device {used - 1} does not exist (there are {count})")
    return {
        "devices": labels("devices", devices, count, "gpu"),
        "servers": _servers(servers, count),
        "memory": table_of("memory", capacity, (count,)),
    }


def _servers(given: Any, count: int) -> tuple[str, ...]:
    if given is None:
        return ("",) * count
    names = listed("servers", given, "a list of names", count)
    return tuple(label(f"servers[{d}]", name) for d, name in enumerate(names))


def jobs_of(jobs: Sequence[int], n_jobs: int) -> list[int]:
    """Check numbers of one job or more."""
    rows = [integer("jobs", j, 0, n_jobs - 1) for j in jobs]
    if not rows:
        raise InputError("jobs: expected at least one job")
    return rows


TIMES: Final = (
    "forward", "backward", "weight", "recompute", "update", "switch", "lag_forward", "lag_backward",
)  # fmt: skip
"""Fields of times by stage or cut."""


def check_together(array: Any) -> None:
    """Refuse values of fields that contradict those of others."""
    kept = np.minimum(array.activation, array.checkpoint)
    if array.recompute_mode == "never":
        kept = array.activation
    elif array.recompute_mode == "always":
        kept = array.checkpoint
    elif not isinstance(array.recompute_mode, str):
        kept = np.where(np.array(array.recompute_mode)[:, None], array.checkpoint, array.activation)
    if array.weight is None and array.weight_memory.any():
        raise InputError("weight_memory: needs weight blocks (weight=...)")
    refuse(
        array.weight_memory > kept, "weight_memory", array.weight_memory, "at most the kept bytes"
    )
    refuse(array.lag_forward < -array.forward[:, :-1], "lag_forward", array.lag_forward,
            "not below minus the forward time of its stage")  # fmt: skip
    refuse(array.lag_backward < -array.backward[:, 1:], "lag_backward", array.lag_backward,
            "not below minus the backward time of the stage it leaves")  # fmt: skip
    if array.update_mode == "fused" and array.microbatch_order == "free" and array.update.any():
        raise InputError(
            'update_mode: "fused" needs microbatch_order="fixed" (else the last micro-batch is '
            'unknown); use "block"'
        )
    if array.objective not in (MAKESPAN, PERIOD) and array.recompute_mode == "choose":
        raise InputError(
            f'recompute_mode: "choose" is for the makespan and the period, not for objective='
            f'"{array.objective}"; give one bool per job'
        )
    if array.objective == "period" and array.release.any():
        raise InputError('release: not allowed with objective="period"')
    times = [getattr(array, key) for key in TIMES if getattr(array, key) is not None]
    # Python integers: the sums themselves may overflow; a switch counts at every block
    once = sum(int(t[t > 0].astype(object).sum()) for t in times)
    once += 5 * int(array.switch.astype(object).sum())
    repeats = zip(array.micro_batches.tolist(), array.multiplicity.tolist(), strict=True)
    total = once * max(m * r for m, r in repeats) + int(array.release.max())
    if total > MAX_INTEGER:
        raise InputError(f"forward, backward, ...: times add up to {total}, more than 2^53")
    n_jobs = len(array.release)
    if array.objective != PERIOD:
        check_sums(goal_of(n_jobs, array.objective, array.job_weight, array.due), n_jobs, total)
    for key in ("activation", "checkpoint", "recompute_workspace", "weight_memory"):
        table, count = getattr(array, key), array.micro_batches.astype(object)
        if (total := int((table.astype(object).sum(axis=1) * count).sum())) > MAX_INTEGER // 4:
            raise InputError(f"{key}: adds up to {total} bytes, more than 2^51")
    _check_switches(array)


def _check_switches(array: Any) -> None:
    """One switch time per (job, device): then setups are triangular."""
    shared = isinstance(array.place[0], int)  # one place for all jobs and micro-batches
    if not array.switch.any() or (shared and len(set(array.place)) == len(array.place)):
        return
    for j in range(len(array.switch)):
        known: dict[int, int] = {}  # device -> a stage on it
        for row in [array.place] if shared else array.place[j]:
            for v, d in enumerate(row):
                first = known.setdefault(d, v)
                if array.switch[j, v] != array.switch[j, first]:
                    raise InputError(
                        f"jobs[{j}].switch[{v}]: {array.switch[j, v]}, but stage {first} on the "
                        f"same device has {array.switch[j, first]}"
                    )
