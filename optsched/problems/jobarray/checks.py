"""Checked arrays, names and places of a `JobArray`; refusals name field, index and value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import integer, label

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

Place: TypeAlias = "tuple[int, ...] | tuple[tuple[tuple[int, ...], ...], ...]"

MAX_BLOCKS: Final = 2_000_000
"""Jobs x micro-batches x stages: beyond, no graph fits into memory."""

RECOMPUTE_MODES: Final = ("never", "always", "choose")


def shape_of(forward: npt.ArrayLike) -> tuple[int, int]:
    """(jobs, stages) of the forward times."""
    array = integers("forward", forward)
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(
            f"forward: expected one row per job with one value per stage, got shape {array.shape}"
        )
    return int(array.shape[0]), int(array.shape[1])


def integers(key: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """An int64 array of any shape; floats, booleans and ragged rows are refused."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise InputError(f"{key}: the rows differ in length") from None
    if array.dtype == object:
        raise InputError(f"{key}: expected integers <= 2^53")
    if not isinstance(values, np.ndarray) and _holds_bool(values):  # NumPy takes True for 1
        raise InputError(f"{key}: expected integers, got true or false")
    if array.dtype.kind == "b" or (
        array.dtype.kind != "i" and array.dtype.kind != "u" and array.size
    ):
        raise InputError(f"{key}: expected integers, got {array.dtype} values")
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_INTEGER:
        raise InputError(f"{key}: expected integers <= 2^53, got {array.max()}")
    return array.astype(np.int64)


def _holds_bool(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_holds_bool, values))
    return isinstance(values, (bool, np.bool_))


def table_of(key: str, values: Any, shape: tuple[int, ...], least: int = 0) -> IntArray:
    """An array of the given shape with values in least..2^53; a scalar fills it."""
    array = integers(key, values)
    if array.ndim == 0:
        array = np.full(shape, array)
    if array.shape != shape:
        raise InputError(f"{key}: expected shape {shape}, got {array.shape}")
    refuse(array < least, key, array, f"an integer >= {least}")
    refuse(array > MAX_INTEGER, key, array, "an integer <= 2^53")
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def refuse(bad: npt.NDArray[np.bool_], key: str, values: IntArray, rule: str) -> None:
    """Raise for the first bad value, by its place."""
    if not bad.any():
        return
    at = [int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape)]
    where = f"devices[{at[0]}].{key}" if key == "memory" else f"jobs[{at[0]}].{key}"
    where += "".join(f"[{k}]" for k in at[1:])
    raise InputError(f"{where}: expected {rule}, got {values[tuple(at)]}")


def names_of(
    key: str, given: Sequence[str] | None, prefix: str | None, count: int
) -> tuple[str, ...]:
    """Distinct names ``prefix0, prefix1, ...`` unless given; without prefix "" and any names."""
    if given is None:
        return tuple("" if prefix is None else f"{prefix}{k}" for k in range(count))
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"{key}: expected a list of names, got {given!r:.60}")
    names = tuple(given)
    if len(names) != count:
        raise InputError(f"{key}: expected {count} names, got {len(names)}")
    seen: dict[str, int] = {}
    for k, text in enumerate(names):
        label(f"{key}[{k}]", text)
        if prefix is not None and text in seen:
            raise InputError(
                f"{key}[{k}]: {format_json(text)} is also the name of {key}[{seen[text]}]"
            )
        seen[text] = k
    return names


def check_blocks(
    micro_batches: IntArray, n_stages: int, multiplicity: IntArray | None = None
) -> None:
    """Refuse what no graph can hold: a typing error would otherwise fill the memory."""
    counts, key, what = micro_batches.tolist(), "micro_batches", "jobs x micro-batches x stages"
    if multiplicity is not None:  # Python integers: the products may overflow
        counts = [m * n for m, n in zip(counts, multiplicity.tolist(), strict=True)]
        key, what = "multiplicity", "jobs x micro-batches x stages x multiplicity"
    total = sum(counts) * n_stages
    if total > MAX_BLOCKS:
        j = max(range(len(counts)), key=counts.__getitem__)
        value = (micro_batches if multiplicity is None else multiplicity)[j]
        raise InputError(
            f"jobs[{j}].{key}: {value}, but {what} may be at most {MAX_BLOCKS}, got {total}"
        )


def flat(place: Place) -> list[int]:
    """All devices named in a place."""
    if isinstance(place[0], int):
        return list(place)
    return [d for job in place for row in job for d in row]


def recompute_of(given: str | Sequence[bool], n_jobs: int) -> str | tuple[bool, ...]:
    """One of the modes, or one bool per job."""
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


def place_of(given: Sequence[Any] | None, micro_batches: IntArray, n_stages: int) -> Place:
    """A device per stage, or per job, micro-batch and stage."""
    if given is None:
        return tuple(range(n_stages))
    if isinstance(given, str) or not isinstance(given, (Sequence, np.ndarray)):
        raise InputError(f"place: expected a list of devices, got {given!r:.60}")
    rows = list(given)
    if rows and not isinstance(rows[0], (int, np.integer)):
        if len(rows) != len(micro_batches):
            raise InputError(
                f"place: expected one entry per job ({len(micro_batches)}), got {len(rows)}"
            )
        nested = []
        for j, job in enumerate(rows):
            if isinstance(job, str) or not isinstance(job, (Sequence, np.ndarray)):
                raise InputError(f"place[{j}]: expected one row per micro-batch, got {job!r:.60}")
            if len(job) != micro_batches[j]:
                raise InputError(
                    f"place[{j}]: expected one row per micro-batch ({micro_batches[j]}), "
                    f"got {len(job)}"
                )
            nested.append(
                tuple(row_of(f"place[{j}][{m}]", row, n_stages) for m, row in enumerate(job))
            )
        return tuple(nested)
    return row_of("place", rows, n_stages)


def row_of(where: str, row: Sequence[Any], n_stages: int) -> tuple[int, ...]:
    """One device per stage."""
    if isinstance(row, str) or not isinstance(row, (Sequence, np.ndarray)):
        raise InputError(f"{where}: expected one device per stage, got {row!r:.60}")
    if len(row) != n_stages:
        raise InputError(f"{where}: expected one device per stage ({n_stages}), got {len(row)}")
    for v, device in enumerate(row):
        integer(f"{where}[{v}]", device, 0, 1_000_000)
    return tuple(int(device) for device in row)


def device_fields(
    place: Place,
    memory: npt.ArrayLike | None,
    devices: Sequence[str] | None,
    servers: Sequence[str] | None,
) -> dict[str, Any]:
    """Names, servers and memory of the devices; refuses a stage on none of them."""
    used = 1 + max(flat(place))
    known = devices if devices is not None else servers
    if known is not None and (isinstance(known, str) or not isinstance(known, Sequence)):
        key = "servers" if devices is None else "devices"
        raise InputError(f"{key}: expected a list of names, got {known!r:.60}")
    capacity = 0 if memory is None else memory
    count = used if known is None else len(known)
    if known is None and np.ndim(capacity) == 1:
        count = len(np.asarray(capacity))
    if used > count:
        raise InputError(f"place: device {used - 1} does not exist (there are {count})")
    return {
        "devices": names_of("devices", devices, "gpu", count),
        "servers": names_of("servers", servers, None, count),
        "memory": table_of("memory", capacity, (count,)),
    }


def jobs_of(jobs: Sequence[int], n_jobs: int) -> list[int]:
    """Numbers of one job or more."""
    rows = list(jobs)
    for j in rows:
        if isinstance(j, bool) or not isinstance(j, (int, np.integer)):
            raise InputError(f"jobs: expected job numbers, got {j!r:.60}")
        if not 0 <= j < n_jobs:
            raise InputError(f"jobs: expected numbers in 0..{n_jobs - 1}, got {j}")
    if not rows:
        raise InputError("jobs: expected at least one job")
    return rows


def known_options(given: Iterable[str], profile: Iterable[str], direct: Iterable[str]) -> None:
    """Refuse options of `JobArray.from_profile` that are none, and name those there are."""
    known = sorted({*profile, *direct} - {"model", "stages", "batch_sizes"})
    for key in given:
        if key not in known:
            raise InputError(f"{key}: not an option of from_profile; there are {', '.join(known)}")


def option_of(key: str, given: Any, legal: Sequence[str] | Sequence[bool]) -> Any:
    """One of the legal values."""
    if type(legal[0]) is bool:
        if not isinstance(given, bool):
            raise InputError(f"{key}: expected true or false, got {given!r:.60}")
    elif given not in legal:
        told = format_json(given) if isinstance(given, str) else f"{given!r:.60}"
        raise InputError(f"{key}: expected one of {', '.join(map(str, legal))}, got {told}")
    return given
