"""The disjunctive graphs of one iteration of a job array, and of a cycle that repeats.

All jobs with the same number of micro-batches and the same recomputation have the same block
pattern, so a pattern is spelled out once and NumPy fills in the jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from optsched.model.objectives import graph_goal
from optsched.model.schedule import Arcs, Csr, IntArray, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.jobarray.fields import JobArrayFields


@dataclass
class _Pattern:
    """Blocks and arcs of one iteration of a job, by local operation numbers."""

    blocks: list[tuple[str, int, int]] = field(default_factory=list)  # kind, micro-batch, stage
    number: dict[tuple[str, int, int], int] = field(default_factory=dict)
    arcs: list[tuple[int, int]] = field(default_factory=list)
    lags: list[tuple[str, int]] = field(default_factory=list)  # which table, which cut
    chained: list[tuple[int, int]] = field(default_factory=list)  # arcs to the next iteration

    def block(self, kind: str, m: int, v: int) -> None:
        self.number[kind, m, v] = len(self.blocks)
        self.blocks.append((kind, m, v))

    def arc(
        self, tail: tuple[str, int, int], head: tuple[str, int, int], lag: str = "", cut: int = 0
    ) -> None:
        self.arcs.append((self.number[tail], self.number[head]))
        self.lags.append((lag, cut))


def build(array: JobArrayFields, recomputes: Sequence[bool], cyclic: bool = False) -> Schedule:
    """Build the graph of one iteration of all jobs, or of one cycle.

    A cycle repeats every job's iteration by its multiplicity; operation ids are job-major, then
    copy-major, then those of `JobArray.graph`. F of a job's next iteration follows, stage by stage,
    the last gradient block (or update) of the iteration before: from one copy to the next with
    distance 0, from the last to the first with distance 1. The period suffices for any order: it is
    the sum of all times.
    """
    copies = array.multiplicity if cyclic else np.ones_like(array.multiplicity)
    groups: dict[tuple[int, bool], list[int]] = {}
    for j, recompute in enumerate(recomputes):
        groups.setdefault((int(array.micro_batches[j]), bool(recompute)), []).append(j)
    patterns = {key: _pattern(array, *key) for key in groups}
    size = np.zeros(array.n_jobs, np.int64)
    for key, members in groups.items():
        size[members] = len(patterns[key].blocks)
    base = np.concatenate([[0], np.cumsum(size * copies)])
    numbers = ("duration", "job", "stage", "microbatch", "iteration", "release", "setup_out",
               "acquire", "free", "workspace", "resource")  # fmt: skip
    columns = {key: np.zeros(base[-1], np.int64) for key in numbers}
    kind = np.zeros(base[-1], "<U3")
    arcs: list[IntArray] = [np.zeros((4, 0), np.int64)]
    chained: list[IntArray] = [np.zeros((4, 0), np.int64)]
    for key, members in groups.items():
        pattern = patterns[key]
        job = np.repeat(members, copies[members])
        copy = np.concatenate([np.arange(copies[j]) for j in members])
        first = base[job] + copy * size[job]
        at = first[:, None] + np.arange(len(pattern.blocks))  # (iterations, blocks)
        kind[at] = [block[0] for block in pattern.blocks]
        if cyclic:
            columns["iteration"][at] = copy[:, None]
        for name, values in _columns(array, pattern, job, key[1]).items():
            columns[name][at] = values
        arcs.append(_arcs(pattern.arcs, first, first, _lags(array, pattern, job), 0))
        if cyclic:
            last = copy + 1 == copies[job]
            after = base[job] + np.where(last, 0, copy + 1) * size[job]
            chained.append(_arcs(pattern.chained, first, after, 0, last[:, None]))
    found = np.concatenate(arcs, axis=1)
    period = None
    if cyclic:
        parts = [found, np.concatenate(chained, axis=1)]
        found = np.hstack([p[:, np.argsort(columns["job"][p[0]], kind="stable")] for p in parts])
        spent = int((columns["duration"] + columns["setup_out"]).sum())
        period = max(1, spent + int(np.maximum(found[2], 0).sum()))
    placed = columns["resource"] >= 0
    return Schedule(
        name=array.name,
        time_unit=array.time_unit,
        resources=tuple(map(Resource, array.devices, array.memory.tolist())),
        op_resources=Csr(np.concatenate([[0], np.cumsum(placed)]), columns.pop("resource")[placed]),
        kind=kind,
        family=columns["job"],
        arcs=Arcs(*found),
        period=period,
        goal=None if cyclic else graph_goal(array.goal),
        **columns,  # type: ignore[arg-type]
    )


def _arcs(
    pairs: list[tuple[int, int]],
    tails: IntArray,
    heads: IntArray,
    lag: IntArray | int,
    distance: IntArray | int,
) -> IntArray:
    """Arcs of a pattern for iterations that begin at `tails` and `heads`; shape (4, arcs)."""
    tail, head = np.array(pairs, np.int64).reshape(-1, 2).T
    rows = (tails[:, None] + tail, heads[:, None] + head, lag, distance)
    return np.stack(np.broadcast_arrays(*rows)).reshape(4, -1)


def overflow_alone(array: JobArrayFields) -> str:
    """Return a sentence about the first micro-batch that overflows a device even alone, or "".

    All forward blocks, then each gradient as early as possible, need the least memory of all
    orders. Where recomputation is to be chosen, a job has to overflow with and without it.
    """
    if not array.memory.any():
        return ""
    if array.recompute_mode != "choose":
        return next(iter(overflows(array, array.recomputes).values()), "")
    without = overflows(array, [False] * array.n_jobs)
    both = without.keys() & overflows(array, [True] * array.n_jobs).keys()
    return without[min(both)] if both else ""


def overflows(array: JobArrayFields, recomputes: Sequence[bool]) -> dict[int, str]:
    """Return jobs that do not fit even alone, each with its first overflow as a sentence."""
    found: dict[int, str] = {}
    graph = build(array, recomputes)
    resource = graph.single_resource
    level: dict[tuple[int, int, int], int] = {}
    for i in np.flatnonzero(graph.acquire + graph.workspace + graph.free).tolist():
        d = int(resource[i])
        key = (int(graph.job[i]), int(graph.microbatch[i]), d)
        capacity = int(array.memory[d])
        need = level.get(key, 0) + int(graph.acquire[i] + graph.workspace[i])
        if 0 < capacity < need and key[0] not in found:
            found[key[0]] = (
                f"{array.names[key[0]]} (job {key[0]}) alone needs {need} bytes on "
                f"{array.devices[d]} for {graph.kind[i]} of stage {graph.stage[i]}, "
                f"there are {capacity}"
            )
        level[key] = level.get(key, 0) + int(graph.acquire[i] - graph.free[i])
    return found


def _pattern(array: JobArrayFields, micro_batches: int, recompute: bool) -> _Pattern:
    """Blocks in topological order, and the arcs of section "Operations and arcs" of the docs."""
    pattern, last = _Pattern(), array.n_stages - 1
    separate = recompute and array.recompute_as_block
    split, fixed = array.weight is not None, array.microbatch_order == "fixed"
    grad = "I" if split else "B"
    # the gradient leaves before a fused update that runs in the same block
    early = array.update_mode == "fused" and not split and not array.update_blocks_gradient
    for m in range(micro_batches):
        leaves = "lag_backward_early" if early and m == micro_batches - 1 else "lag_backward"
        for v in range(last + 1):
            pattern.block("F", m, v)
            if v:
                pattern.arc(("F", m, v - 1), ("F", m, v), "lag_forward", v - 1)
        for v in range(last, -1, -1):
            if separate:
                pattern.block("R", m, v)
                pattern.arc(("F", m, v), ("R", m, v))
            pattern.block(grad, m, v)
            if separate:
                pattern.arc(("R", m, v), (grad, m, v))
            if v == last:
                pattern.arc(("F", m, v), (grad, m, v))
            else:
                pattern.arc((grad, m, v + 1), (grad, m, v), leaves, v)
            if split:
                pattern.block("W", m, v)
                pattern.arc(("I", m, v), ("W", m, v))
        if m and fixed:
            for kind in ("F", grad, "W") if split else ("F", grad):
                for v in range(last + 1):
                    pattern.arc((kind, m - 1, v), (kind, m, v))
    has_updates = array.update_mode in ("block", "global")
    if has_updates:
        _add_updates(array, pattern, micro_batches, grad)
    if array.trailing_switch:
        pattern.block("end", 0, 0)
        for m in range(micro_batches):
            pattern.arc((grad, m, 0), ("end", 0, 0), "switch", 0)
    final = "U" if has_updates else "W" if split else grad
    ends = [0] if has_updates else [micro_batches - 1] if fixed else range(micro_batches)
    pattern.chained = [
        (pattern.number[final, m, v], pattern.number["F", n, v])
        for v in range(last + 1)
        for m in ends
        for n in range(1 if fixed else micro_batches)
    ]
    return pattern


def _add_updates(array: JobArrayFields, pattern: _Pattern, micro_batches: int, grad: str) -> None:
    for v in range(array.n_stages):
        pattern.block("U", 0, v)
        for m in range(micro_batches):
            pattern.arc((grad, m, v), ("U", 0, v))
            if array.weight is not None:
                pattern.arc(("W", m, v), ("U", 0, v))
            if array.update_mode == "global" and v:
                pattern.arc((grad, m, 0), ("U", 0, v))


def _tables(array: JobArrayFields, recompute: bool) -> dict[str, dict[str, IntArray]]:
    """Per kind of block the fields that are not 0, each of shape (K, V)."""
    inside = recompute and not array.recompute_as_block
    kept = array.checkpoint if recompute else array.activation
    gradient = {"duration": array.backward, "free": kept - array.weight_memory}
    if inside:
        gradient["duration"] = array.backward + array.recompute
        gradient["workspace"] = array.recompute_workspace
    elif recompute:
        gradient["free"] = gradient["free"] + array.recompute_workspace
    found = {"F": {"duration": array.forward, "acquire": kept}, "U": {"duration": array.update}}
    if recompute and not inside:
        found["R"] = {"duration": array.recompute, "acquire": array.recompute_workspace}
    if array.weight is None:
        return {**found, "B": gradient}
    return {**found, "I": gradient, "W": {"duration": array.weight, "free": array.weight_memory}}


def _columns(
    array: JobArrayFields, pattern: _Pattern, job: IntArray, recompute: bool
) -> dict[str, IntArray]:
    """Per-operation fields of iterations of the given jobs, each of shape (iterations, blocks)."""
    kinds, m, v = (np.array(column) for column in zip(*pattern.blocks, strict=True))
    jobs, shape = job[:, None], (len(job), len(kinds))
    found = {key: np.zeros(shape, np.int64) for key in ("duration", "acquire", "free", "workspace")}
    for kind, tables in _tables(array, recompute).items():
        here = np.flatnonzero(kinds == kind)
        for key, table in tables.items():
            found[key][:, here] = table[jobs, v[here]]
    if array.update_mode == "fused":
        updating = np.flatnonzero(
            (m == m.max()) & (kinds == ("B" if array.weight is None else "W"))
        )
        found["duration"][:, updating] += array.update[jobs, v[updating]]
    if isinstance(array.place[0], int):
        resource = np.array(array.place)[v]
    else:
        resource = np.stack([np.array(array.place[j])[m, v] for j in job.tolist()])
    return {
        "job": jobs,
        "stage": v,
        "microbatch": m,
        "release": np.where((kinds == "F") & (v == 0), array.release[jobs], 0),
        "resource": np.where(kinds == "end", -1, resource),
        "setup_out": np.where(kinds == "end", 0, array.switch[jobs, v]),
        **found,
    }


def _lags(array: JobArrayFields, pattern: _Pattern, job: IntArray) -> IntArray:
    """Lags of the arcs of iterations of the given jobs, shape (iterations, arcs)."""
    tables = {
        "": np.zeros((array.n_jobs, 1), np.int64),
        "lag_forward": array.lag_forward,
        "lag_backward": array.lag_backward,
        "lag_backward_early": array.lag_backward - array.update[:, 1:],
        "switch": array.switch,
    }
    columns = [tables[name][job, cut] for name, cut in pattern.lags]
    return np.array(columns, np.int64).reshape(len(columns), len(job)).T
