"""Rigid jobs by hand, and equal logs."""

from __future__ import annotations

from optsched.cluster import Job, Log, Workload

SECOND = 10**6


def workload(submit: list[int], gpus: list[int], duration: list[int]) -> Workload:
    """Trace rows as jobs."""
    return Workload.of(
        Job(name=f"j{i}", submit=s, sizes=(g,), work=d * g * SECOND)
        for i, (s, g, d) in enumerate(zip(submit, gpus, duration, strict=True))
    )


def same(first: Log, second: Log) -> bool:
    """Whether two logs are equal in every column."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.tolist() == b.tolist())
        for a, b in zip(first, second, strict=True)
    )
