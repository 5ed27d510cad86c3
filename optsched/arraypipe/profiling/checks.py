"""Whether the entries of a profile fit together: none is missing, none is there twice."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.strict_json import format_json
from optsched.io.values import label

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.arraypipe.profiling.document import Profile

_Case = tuple[int, int, str]  # stage, micro-batch size, dtype


def check(profile: Profile) -> None:
    """Refuse a profile that could not answer for all its jobs; the sentence names the field."""
    for key, entries in (("stages", profile.stages), ("jobs", profile.jobs)):
        if not entries:
            raise InputError(f"{key}: expected at least one, got none")
        _distinct(key, [entry.name for entry in entries])
    for key in ("name", "torch", "date", "optsched"):
        label(f"device.{key}", getattr(profile.device, key))
    try:
        datetime.fromisoformat(profile.device.date)
    except ValueError:
        raise InputError(
            f"device.date: expected a date such as 2025-01-31T12:00:00+00:00, "
            f"got {format_json(profile.device.date)}"
        ) from None
    for j, job in enumerate(profile.jobs):
        label(f"jobs[{j}].optimizer", job.optimizer, 1000)
        if job.microbatches > job.batch_size:
            raise InputError(
                f"jobs[{j}].microbatches: expected 1..{job.batch_size} (the batch size), "
                f"got {job.microbatches}"
            )
    _check_states(profile)
    _check_blocks(profile)
    cases = {(b.stage, b.batch, b.dtype) for b in profile.blocks if b.kind == "F"}
    _check_bytes("boundaries", [(e.stage, e.batch, e.dtype) for e in profile.boundaries], cases)
    _check_bytes("saved", [(e.stage, e.batch, e.dtype) for e in profile.saved], cases)


def _check_states(profile: Profile) -> None:
    names = [job.name for job in profile.jobs]
    for s, stage in enumerate(profile.stages):
        for name in names:
            if name not in stage.state:
                raise InputError(f"stages[{s}].state: job {format_json(name)} is missing")
        for name in stage.state:
            if name not in names:
                raise InputError(f"stages[{s}].state: there is no job {format_json(name)}")


def _check_blocks(profile: Profile) -> None:
    """Every stage has the same measured sizes for F, R and B, and U of every optimizer."""
    n_stages, n_jobs = len(profile.stages), len(profile.jobs)
    seen: dict[tuple[object, ...], int] = {}
    for i, b in enumerate(profile.blocks):
        _in_range(f"blocks[{i}].stage", b.stage, n_stages)
        if b.kind == "U":
            _in_range(f"blocks[{i}].job", b.job, n_jobs)
            key = ("U", b.stage, b.dtype, profile.jobs[b.job].optimizer)
            if b.batch:
                raise InputError(f"blocks[{i}].batch: an update has none, expected 0")
            if b.dtype != profile.jobs[b.job].precision:
                raise InputError(
                    f"blocks[{i}].dtype: expected {profile.jobs[b.job].precision} (the precision "
                    f"of job {b.job}), got {b.dtype}"
                )
        else:
            key = (b.kind, b.stage, b.dtype, b.batch)  # type: ignore[assignment]
            if b.job != -1:
                raise InputError(f"blocks[{i}].job: expected -1 for {b.kind}, got {b.job}")
            if not b.batch:
                raise InputError(f"blocks[{i}].batch: expected an integer >= 1, got 0")
        if b.minimum_ns > b.median_ns:
            raise InputError(
                f"blocks[{i}].minimum_ns: {b.minimum_ns} is above the median {b.median_ns}"
            )
        if seen.setdefault(key, i) != i:
            raise InputError(f"blocks[{i}]: the same case as blocks[{seen[key]}]")
    sizes = {(b.dtype, b.batch) for b in profile.blocks if b.kind != "U"}
    for j, job in enumerate(profile.jobs):
        if job.precision not in {dtype for dtype, _ in sizes}:
            raise InputError(f"blocks: there are none in {job.precision}, as job {j} needs")
        for s in range(n_stages):
            if ("U", s, job.precision, job.optimizer) not in seen:
                raise InputError(f"blocks: U of stage {s} for job {j} is missing")
    for kind in "FRB":
        for s in range(n_stages):
            for dtype, size in sorted(sizes):
                if (kind, s, dtype, size) not in seen:
                    raise InputError(
                        f"blocks: {kind} of stage {s} at micro-batch {size} in {dtype} is missing"
                    )


def _check_bytes(key: str, entries: Sequence[_Case], cases: Iterable[_Case]) -> None:
    """One entry for every case that was timed."""
    known = set(cases)
    seen: dict[_Case, int] = {}
    for i, case in enumerate(entries):
        if case not in known:
            raise InputError(
                f"{key}[{i}]: no block of stage {case[0]} at micro-batch {case[1]} in {case[2]}"
            )
        if seen.setdefault(case, i) != i:
            raise InputError(f"{key}[{i}]: the same case as {key}[{seen[case]}]")
    for s, size, dtype in sorted(known - set(seen)):
        raise InputError(f"{key}: stage {s} at micro-batch {size} in {dtype} is missing")


def _distinct(key: str, names: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for k, name in enumerate(names):
        label(f"{key}[{k}].name", name)
        if seen.setdefault(name, k) != k:
            raise InputError(
                f"{key}[{k}].name: {format_json(name)} is also the name of {key}[{seen[name]}]"
            )


def _in_range(place: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise InputError(f"{place}: expected 0..{count - 1}, got {value}")
