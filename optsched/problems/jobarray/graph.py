"""The disjunctive graphs of one iteration of a job array, and of a cycle that repeats.

All jobs with the same number of micro-batches and the same recomputation have the same block
pattern, so a pattern is spelled out once and NumPy fills in the jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.schedule import Arcs, IntArray, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.jobarray.fields import JobArrayFields


@dataclass
class _Pattern:
    """Blocks and arcs of one job, by local operation numbers."""

    blocks: list[tuple[str, int, int]] = field(default_factory=list)  # kind, micro-batch, stage
    number: dict[tuple[str, int, int], int] = field(default_factory=dict)
    arcs: list[tuple[int, int]] = field(default_factory=list)
    lags: list[tuple[str, int]] = field(default_factory=list)  # which table, which cut

    def block(self, kind: str, m: int, v: int) -> None:
        self.number[kind, m, v] = len(self.blocks)
        self.blocks.append((kind, m, v))

    def arc(
        self, tail: tuple[str, int, int], head: tuple[str, int, int], lag: str = "", cut: int = 0
    ) -> None:
        self.arcs.append((self.number[tail], self.number[head]))
        self.lags.append((lag, cut))


def build(array: JobArrayFields, recomputes: Sequence[bool]) -> Schedule:
    """The graph of one iteration; `recomputes` says which jobs recompute."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for j, recompute in enumerate(recomputes):
        groups.setdefault((int(array.micro_batches[j]), bool(recompute)), []).append(j)
    patterns = {key: _pattern(array, *key) for key in groups}
    sizes = np.zeros(array.n_jobs, np.int64)
    for key, rows in groups.items():
        sizes[rows] = len(patterns[key].blocks)
    base = np.concatenate([[0], np.cumsum(sizes)])
    columns: dict[str, Any] = {
        key: np.zeros(base[-1], np.int64)
        for key in ("duration", "job", "stage", "microbatch", "release", "setup", "acquire", "free",
                    "workspace", "resource")
    }  # fmt: skip
    kind = np.zeros(base[-1], "<U3")
    arcs: list[list[IntArray]] = [[], [], []]
    for key, members in groups.items():
        jobs, pattern = np.array(members), patterns[key]
        at = base[jobs][:, None] + np.arange(len(pattern.blocks))  # (jobs, blocks)
        kind[at] = [block[0] for block in pattern.blocks]
        for name, values in _columns(array, pattern, jobs, key[1]).items():
            columns[name][at] = values
        if pattern.arcs:
            tail, head = np.array(pattern.arcs).T
            arcs[0].append((base[jobs][:, None] + tail).ravel())
            arcs[1].append((base[jobs][:, None] + head).ravel())
            arcs[2].append(_lags(array, pattern, jobs).ravel())
    tail, head, lag = (np.concatenate([np.zeros(0, np.int64), *part]) for part in arcs)
    placed = columns["resource"] >= 0
    indptr = np.concatenate([[0], np.cumsum(placed)])
    setup = columns["setup"]
    return Schedule(
        name=array.name,
        time_unit=array.time_unit,
        resources=tuple(
            Resource(name, int(memory))
            for name, memory in zip(array.devices, array.memory, strict=True)
        ),
        op_resources=Rows(indptr, columns["resource"][placed]),
        duration=columns["duration"],
        kind=kind,
        family=columns["job"],
        setup_in=setup if array.switch_on == "in" else None,  # type: ignore[arg-type]
        setup_out=setup if array.switch_on == "out" else None,  # type: ignore[arg-type]
        arcs=Arcs(tail, head, lag, np.zeros(len(tail), np.int64)),
        **{
            key: columns[key]
            for key in ("job", "stage", "microbatch", "release", "acquire", "free", "workspace")
        },
    )


def cycle_graph(array: JobArrayFields, recomputes: Sequence[bool]) -> Schedule:
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


def overflow_alone(array: JobArrayFields) -> str:
    """The first micro-batch that overflows a device even with nothing else there, as a sentence.

    Forward down the stages, then each gradient as soon as it may, needs the least memory a job can
    need: if that does not fit, nothing does. Where recomputation is to be chosen, a job overflows
    if it does both ways; the sentence is about the way without.
    """
    if not array.memory.any():
        return ""
    if array.recompute_mode != "choose":
        return next(iter(overflows(array, array.recomputes).values()), "")
    without = overflows(array, [False] * array.n_jobs)
    both = without.keys() & overflows(array, [True] * array.n_jobs).keys()
    return without[min(both)] if both else ""


def overflows(array: JobArrayFields, recomputes: Sequence[bool]) -> dict[int, str]:
    """Per job that does not fit even alone: its first overflow, as a sentence."""
    found: dict[int, str] = {}
    graph = build(array, recomputes)
    resource = graph.single_resource
    level: dict[tuple[int, int, int], int] = {}
    for i in np.flatnonzero(graph.acquire + graph.workspace + graph.free).tolist():
        d = int(resource[i])
        key = (int(graph.job[i]), int(graph.microbatch[i]), d)
        there = int(array.memory[d])
        need = level.get(key, 0) + int(graph.acquire[i] + graph.workspace[i])
        if 0 < there < need and key[0] not in found:
            found[key[0]] = (
                f"{array.names[key[0]]} (job {key[0]}) alone needs {need} bytes on "
                f"{array.devices[d]} for {graph.kind[i]} of stage {graph.stage[i]}, "
                f"there are {there}"
            )
        level[key] = level.get(key, 0) + int(graph.acquire[i] - graph.free[i])
    return found


def _pattern(array: JobArrayFields, micro_batches: int, recompute: bool) -> _Pattern:
    """Blocks in topological order, and the arcs of section "Operations and arcs" of the docs."""
    pattern, last = _Pattern(), array.n_stages - 1
    separate = recompute and array.recompute_as_block
    grad = "B" if array.weight is None else "I"
    for m in range(micro_batches):
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
                early = m == micro_batches - 1 and _leaves_early(array)
                table = "lag_backward_early" if early else "lag_backward"
                pattern.arc((grad, m, v + 1), (grad, m, v), table, v)
            if array.weight is not None:
                pattern.block("W", m, v)
                pattern.arc(("I", m, v), ("W", m, v))
        if m and array.microbatch_order == "fixed":
            for kind in ("F", grad) if array.weight is None else ("F", grad, "W"):
                for v in range(last + 1):
                    pattern.arc((kind, m - 1, v), (kind, m, v))
    _add_updates(array, pattern, micro_batches, grad)
    if array.trailing_switch:
        pattern.block("end", 0, 0)
        for m in range(micro_batches):
            pattern.arc((grad, m, 0), ("end", 0, 0), "switch", 0)
    return pattern


def _add_updates(array: JobArrayFields, pattern: _Pattern, micro_batches: int, grad: str) -> None:
    if array.update_mode not in ("block", "global"):
        return
    for v in range(array.n_stages):
        pattern.block("U", 0, v)
        for m in range(micro_batches):
            pattern.arc((grad, m, v), ("U", 0, v))
            if array.weight is not None:
                pattern.arc(("W", m, v), ("U", 0, v))
            if array.update_mode == "global" and v:
                pattern.arc((grad, m, 0), ("U", 0, v))


def _leaves_early(array: JobArrayFields) -> bool:
    """Whether the gradient leaves before a fused update that runs in the same block."""
    return (
        array.update_mode == "fused" and array.weight is None and not array.update_blocks_gradient
    )


def _columns(
    array: JobArrayFields, pattern: _Pattern, jobs: IntArray, recompute: bool
) -> dict[str, IntArray]:
    """Per-operation fields of the given jobs, each of shape (jobs, blocks)."""
    shape = (len(jobs), len(pattern.blocks))
    out = {key: np.zeros(shape, np.int64) for key in ("duration", "acquire", "free", "workspace")}
    kinds = np.array([block[0] for block in pattern.blocks])
    m = np.array([block[1] for block in pattern.blocks])
    v = np.array([block[2] for block in pattern.blocks])
    final = m == m.max()

    def at(table: IntArray, where: IntArray) -> IntArray:
        values: IntArray = table[jobs[:, None], v[where]]
        return values

    none = np.zeros_like(array.forward)
    kept = array.checkpoint if recompute else array.activation
    inside = recompute and not array.recompute_as_block
    extra = array.recompute_workspace if recompute else none
    fused = array.update if array.update_mode == "fused" else none
    for kind in ("F", "R", "B", "I", "W", "U"):
        here = np.flatnonzero(kinds == kind)
        if not len(here):
            continue
        if kind == "F":
            out["duration"][:, here] = at(array.forward, here)
            out["acquire"][:, here] = at(kept, here)
        elif kind == "R":
            out["duration"][:, here] = at(array.recompute, here)
            out["acquire"][:, here] = at(extra, here)
        elif kind in "BI":
            out["duration"][:, here] = at(array.backward, here)
            if inside:
                out["duration"][:, here] += at(array.recompute, here)
                out["workspace"][:, here] = at(extra, here)
            freed = kept + (extra if recompute and not inside else none)
            out["free"][:, here] = at(freed - array.weight_memory, here)
        elif kind == "W":
            assert array.weight is not None
            out["duration"][:, here] = at(array.weight, here)
            out["free"][:, here] = at(array.weight_memory, here)
        else:
            out["duration"][:, here] = at(array.update, here)
    updating = np.flatnonzero(final & (kinds == ("B" if array.weight is None else "W")))
    out["duration"][:, updating] += at(fused, updating)
    resource = np.array(
        [[array.devices_of(int(j), k)[stage] for k, stage in zip(m, v, strict=True)] for j in jobs]
        if not isinstance(array.place[0], int)
        else np.broadcast_to(np.array(array.place)[v], shape)
    )
    out["resource"] = np.where(kinds == "end", -1, resource)
    out["setup"] = np.where(kinds == "end", 0, at(array.switch, np.arange(shape[1])))
    out["job"] = np.broadcast_to(jobs[:, None], shape)
    out["stage"], out["microbatch"] = np.broadcast_to(v, shape), np.broadcast_to(m, shape)
    starts = (kinds == "F") & (v == 0)
    out["release"] = np.where(starts, array.release[jobs][:, None], 0)
    return out


def _lags(array: JobArrayFields, pattern: _Pattern, jobs: IntArray) -> IntArray:
    """Lags of the arcs of the given jobs, shape (jobs, arcs)."""
    tables = {
        "": np.zeros((array.n_jobs, 1), np.int64),
        "lag_forward": array.lag_forward,
        "lag_backward": array.lag_backward,
        "lag_backward_early": array.lag_backward - array.update[:, 1:],
        "switch": array.switch,
    }
    return np.stack([tables[name][jobs, cut] for name, cut in pattern.lags], axis=1)


def _copies(once: Schedule, multiplicity: IntArray) -> tuple[IntArray, IntArray, list[IntArray]]:
    """Original and copy number of every operation, and where every copy of every job begins."""
    first = np.searchsorted(once.job, np.arange(len(multiplicity) + 1))
    size = np.diff(first)
    source = [np.tile(np.arange(first[j], first[j + 1]), n) for j, n in enumerate(multiplicity)]
    copy = [np.repeat(np.arange(n), size[j]) for j, n in enumerate(multiplicity)]
    begin = np.concatenate([[0], np.cumsum(size * multiplicity)])
    base = [begin[j] + size[j] * np.arange(n) for j, n in enumerate(multiplicity)]
    return np.concatenate(source), np.concatenate(copy), base


def _repeated(once: Schedule, array: JobArrayFields, base: list[IntArray]) -> Arcs:
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


def _iterations(array: JobArrayFields, once: Schedule, base: list[IntArray]) -> Arcs:
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
