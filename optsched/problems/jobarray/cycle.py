"""The cycle of a rolling job array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.schedule import Arcs, Rows, Schedule
from optsched.problems.jobarray.graph import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.problem import JobArray


def cycle_graph(array: JobArray, recomputes: Sequence[bool]) -> Schedule:
    """All blocks of one cycle: every job's iteration, as often as its multiplicity says.

    Operation ids are job-major, then copy-major, then those of `JobArray.graph`. A job's next
    iteration waits, stage by stage, for the last gradient block (or update) of the one before:
    from one copy to the next with distance 0, from the last to the first with distance 1. The
    period is one that certainly suffices: everything after everything else.
    """
    once = build(array, recomputes)
    source, copy, base = _copies(once, array.multiplicity)
    arcs = _repeated(once, array, base)
    chained = _iterations(array, once, base)
    tail, head, lag, distance = (
        np.concatenate([one, two]) for one, two in zip(arcs, chained, strict=True)
    )
    columns = {
        key: getattr(once, key)[source]
        for key in ("duration", "kind", "job", "stage", "microbatch", "family", "setup_in",
                    "setup_out", "acquire", "free", "workspace")
    }  # fmt: skip
    placed = once.single_resource[source]
    indptr = np.concatenate([[0], np.cumsum(placed >= 0)])
    spent = columns["duration"] + columns["setup_in"] + columns["setup_out"]
    return Schedule(
        name=once.name,
        time_unit=once.time_unit,
        resources=once.resources,
        op_resources=Rows(indptr, placed[placed >= 0]),
        iteration=copy,
        arcs=Arcs(tail, head, lag, distance),
        period=max(1, int(spent.sum()) + int(lag[lag > 0].sum())),
        **columns,
    )


def _copies(once: Schedule, multiplicity: IntArray) -> tuple[IntArray, IntArray, list[IntArray]]:
    """Original and copy number of every operation, and where every copy of every job begins."""
    first = np.searchsorted(once.job, np.arange(len(multiplicity) + 1))
    size = np.diff(first)
    source = [np.tile(np.arange(first[j], first[j + 1]), n) for j, n in enumerate(multiplicity)]
    copy = [np.repeat(np.arange(n), size[j]) for j, n in enumerate(multiplicity)]
    begin = np.concatenate([[0], np.cumsum(size * multiplicity)])
    base = [begin[j] + size[j] * np.arange(n) for j, n in enumerate(multiplicity)]
    return np.concatenate(source), np.concatenate(copy), base


def _repeated(once: Schedule, array: JobArray, base: list[IntArray]) -> Arcs:
    """The arcs of one iteration for every copy."""
    tail, head, lag, _ = once.arcs
    first = np.searchsorted(once.job, np.arange(array.n_jobs))
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    for j in range(array.n_jobs):
        mine = np.flatnonzero(once.job[tail] == j)
        shift = (base[j] - first[j])[:, None]
        parts.append((
            (tail[mine] + shift).ravel(),
            (head[mine] + shift).ravel(),
            np.broadcast_to(lag[mine], (len(shift), len(mine))).ravel(),
        ))  # fmt: skip
    tails, heads, lags = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Arcs(tails, heads, lags, np.zeros(len(lags), np.int64))


def _iterations(array: JobArray, once: Schedule, base: list[IntArray]) -> Arcs:
    """Arcs from every iteration of a job to its next one."""
    fixed = array.microbatch_order == "fixed"
    has_updates = array.update_mode in ("block", "global")
    final = "U" if has_updates else "B" if array.weight is None else "W"
    rows: list[IntArray] = []
    first = np.searchsorted(once.job, np.arange(array.n_jobs))
    by_key: dict[tuple[int, str, int], list[int]] = {}
    keys = zip(once.job.tolist(), once.kind.tolist(), once.stage.tolist(), strict=True)
    for i, key in enumerate(keys):
        if key[1] in ("F", final):
            by_key.setdefault(key, []).append(i)  # ascending in the micro-batch
    for j in range(array.n_jobs):
        pairs = [
            (i - first[j], k - first[j])
            for v in range(array.n_stages)
            for i in by_key[j, final, v][-1 if fixed else 0 :]
            for k in by_key[j, "F", v][: 1 if fixed else None]
        ]
        tail, head = np.array(pairs, np.int64).T
        after = np.roll(base[j], -1)
        wraps = np.zeros((len(after), len(tail)), np.int64)
        wraps[-1] = 1
        rows.append(
            np.stack([
                (base[j][:, None] + tail).ravel(), (after[:, None] + head).ravel(),
                np.zeros(wraps.size, np.int64), wraps.ravel(),
            ])
        )  # fmt: skip
    return Arcs(*np.concatenate(rows, axis=1))
