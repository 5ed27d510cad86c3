"""A running cluster as the start of a simulation: stays of jobs on nodes up to now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from optsched.cluster.workload.job import WORK
from optsched.cluster.world import layout
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text
from optsched.io.values import format_value, integer
from optsched.io.values import number as number_of

if TYPE_CHECKING:
    import os

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Describe one uninterrupted stay of a job on its GPUs, closed or still open.

    Parameters
    ----------
    job
        Name of the job.
    start
        When it began.
    nodes
        GPUs by number of the node; empty for a zero-slot task.
    end
        When it was stopped; None: it still runs.
    restart
        Time at its beginning without progress.
    work
        Work done in it until its end, or until now; None: the speed of its size times the time
        after the restart.

    Examples
    --------
    >>> optsched.cluster.Stay(job="a", start=0, nodes={0: 8}).end is None
    True
    """

    job: str
    start: int
    nodes: Mapping[int, int] = field(default_factory=dict, hash=False)
    end: int | None = None
    restart: int = 0
    work: int | None = None


@dataclass(frozen=True)
class Start:
    """Describe the state of a cluster just before the decisions of an instant.

    Jobs that were submitted before `now` and have no open stay are waiting. A job has ended if its
    stays did all of its work.

    Parameters
    ----------
    now
        When the simulation begins: the policy decides then for the first time.
    stays
        Stays of jobs before now; those that are closed matter for work that is done already.

    Raises
    ------
    InputError
        Times or work that are no whole numbers, or in the wrong order.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, Start, Stay, Workload, simulate
    >>> jobs = Workload.of([Job(name=name, sizes=(8,), work=8 * 10**8) for name in "ab"])
    >>> start = Start(10, [Stay(job="a", start=0, nodes={0: 8})])
    >>> simulate(jobs, "fifo", Nodes(1, gpus=8), start=start).log.finished.tolist()
    [100, 200]
    """

    now: int
    stays: tuple[Stay, ...] = ()

    def __post_init__(self) -> None:
        now = integer("start.now", self.now)
        if isinstance(self.stays, (str, Stay)) or not isinstance(self.stays, Iterable):
            raise InputError(f"start.stays: expected a list of Stay, got {self.stays!r:.80}")
        object.__setattr__(self, "stays", tuple(self.stays))
        for i, stay in enumerate(self.stays):
            place = f"start.stays[{i}]"
            if not isinstance(stay, Stay):
                raise InputError(f"{place}: expected a Stay, got {format_value(stay)}")
            if integer(f"{place}.start", stay.start) >= now:
                raise InputError(f"{place}.start: {stay.start} is not before now, {now}")
            if stay.end is not None and not stay.start < integer(f"{place}.end", stay.end) <= now:
                raise InputError(
                    f"{place}.end: {stay.end} is not after its start {stay.start} and up to now, "
                    f"{now}; leave it out for a job that still runs"
                )
            integer(f"{place}.restart", stay.restart)
            if stay.work is not None:
                integer(f"{place}.work", stay.work, 0, 2**62)
            if not isinstance(stay.nodes, Mapping):
                raise InputError(f"{place}.nodes: expected GPUs by node such as {{0: 8}}")
            for node, gpus in stay.nodes.items():
                integer(f"{place}.nodes: node", node)
                integer(f"{place}.nodes[{node}]", gpus, 1)


class _Line(msgspec.Struct):
    job_id: str
    start_s: int
    nodes: str = ""
    end_s: int | None = None
    restart_s: int = 0
    work_s: float | None = None


COLUMNS: Final = _Line.__struct_fields__


def read_start(path: str | os.PathLike[str], nodes: Nodes, now: int) -> Start:
    r"""Read stays from a CSV file; times are whole seconds, as in a trace.

    Parameters
    ----------
    path
        Columns ``job_id``, ``start_s``, ``nodes`` (GPUs by name of the node, ``n0:4|n1:4``; empty
        for a zero-slot task), and, if need be, ``end_s`` (empty: it still runs), ``restart_s`` and
        ``work_s`` (work done in the stay, in seconds on one GPU).
    nodes
        The cluster, for the names of its nodes.
    now
        When the simulation begins.

    Raises
    ------
    InputError
        With ``file:line`` and the column.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from optsched.cluster import Nodes, read_start
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "stays.csv")
    ...     _ = path.write_text("job_id,start_s,nodes\na,0,n0:4|n1:4\n")
    ...     read_start(path, Nodes(2, gpus=8), now=60).stays[0].nodes
    {0: 4, 1: 4}
    """
    number = {name: n for n, name in enumerate(nodes.names)}
    stays = []
    for place, cells in csv_records(read_text(path), str(path), COLUMNS, COLUMNS[:3]):
        given = {key: cell for key, cell in cells.items() if cell or key == "job_id"}
        try:
            row = msgspec.convert(given, _Line, strict=False)
        except msgspec.ValidationError as error:
            raise InputError(f"{place}: {error}") from None
        held = {}
        for part in filter(None, row.nodes.split("|")):
            name, _, gpus = part.rpartition(":")
            if name not in number or not gpus.isdecimal() or number[name] in held:
                raise InputError(
                    f"{place}: nodes: expected GPUs by node such as n0:4|n1:4, each node once "
                    f"({nodes.names[0]} to {nodes.names[-1]}), got {format_value(row.nodes)}"
                )
            held[number[name]] = int(gpus)
        work = row.work_s
        if work is not None:
            work = round(number_of(f"{place}: work_s", work, 0.0, 2.0**62 / WORK) * WORK)
        stays.append(Stay(job=row.job_id, start=row.start_s, nodes=held, end=row.end_s,
                          restart=row.restart_s, work=work))  # fmt: skip
    return Start(now, tuple(stays))


class Row(NamedTuple):
    """A stay with what the world says about it."""

    job: int
    stay: Stay
    gpus: int
    rate: int
    before: int
    """Work of the job before this stay."""
    done: int
    """Work of the job at its end, or just before now."""


def rows_of(start: Start, workload: Workload, nodes: Nodes, *, overdue: bool = False) -> list[Row]:
    """The stays in the order of their starts, with speed and work; each is checked.

    With `overdue`, running jobs may have done more than their work already.
    """
    number = {name: j for j, name in enumerate(workload.names)}
    order = sorted(range(len(start.stays)), key=lambda i: start.stays[i].start)
    last: dict[int, Row] = {}
    found = []
    for i in order:
        stay, place = start.stays[i], f"start.stays[{i}]"
        if stay.job not in number:
            raise InputError(f"{place}.job: no job {format_value(stay.job)}")
        j, at = number[stay.job], f"{place} (job {format_value(stay.job)})"
        if stay.start < workload.submit[j]:
            raise InputError(f"{at}: starts at {stay.start}, submitted at {workload.submit[j]}")
        before = last.get(j)
        if before and (before.stay.end is None or before.stay.end > stay.start):
            raise InputError(f"{at}: starts at {stay.start}, during another stay of the job")
        gpus = sum(stay.nodes.values())
        wrong = [node for node in stay.nodes if node >= len(nodes)]
        if wrong:
            raise InputError(f"{at}: no node {wrong[0]}, nodes are 0 to {len(nodes) - 1}")
        sizes = workload.sizes_of(j).tolist()
        if gpus not in sizes:
            raise InputError(f"{at}: {gpus} GPUs are not one of the job's sizes {sizes}")
        kinds = {nodes.types[node] for node in stay.nodes}
        if len(kinds) > 1:
            raise InputError(f"{at}: its nodes have GPUs of several types: {sorted(kinds)}")
        column = workload.rates_on(kinds.pop()) if kinds else workload.rate
        rate = int(column[workload.size_ptr[j] + sizes.index(gpus)])
        if rate == 0:
            raise InputError(f"{at}: the job does not run on that type of GPU")
        done, total = before.done if before else 0, int(workload.work[j])
        end = start.now - 1 if stay.end is None else stay.end
        work = rate * max(0, end - stay.start - stay.restart) if stay.work is None else stay.work
        if stay.end is None and done + work >= total and not overdue:
            raise InputError(
                f"{at}: would have done all of the job's work {total} before now, {start.now}; "
                "give the work that is done in the stay, or the job more work"
            )
        over = stay.work is not None and done + work > total and not overdue
        if done >= total or over:
            raise InputError(f"{at}: {done + work} is more than the job's work, {total}")
        last[j] = Row(
            j, stay, gpus, rate, done, done + work if overdue else min(done + work, total)
        )
        found.append(last[j])
    return found


def restored(w: World, workload: Workload, nodes: Nodes, start: Start) -> World:
    """The world just before the decisions of `start.now`; `w` is that before the first event."""
    now, rows = start.now, rows_of(start, workload, nodes)
    state = w.state
    state["time"], state["wake"] = now - 1, now
    state["changes"] = over = int(np.searchsorted(w.change["when"], now))
    for change in w.change[:over]:
        w.node["takes"][change["which"]] = change["kind"] == layout.ADD
    w = _logged(w, rows)
    for r, row in enumerate(rows):
        _after(w, r, row, now)
    _preempted(w, rows)
    _take_gpus(w, rows)
    _arrived(w, workload, now)
    running = np.flatnonzero(w.job["phase"] == layout.RUNS)
    heap = running[np.lexsort((running, w.job["next"][running]))]
    w.heap[: len(heap), 0], w.heap[: len(heap), 1] = w.job["next"][heap], heap
    w.job["slot"][heap] = np.arange(len(heap))
    state["running_now"] = len(heap)
    state["free_gpus"] = (w.node["free"] * w.node["takes"]).sum()
    state["version"] += 1
    return w


def _logged(w: World, rows: list[Row]) -> World:
    """Write the rows of the log, by start and job."""
    rows.sort(key=lambda row: (row.stay.start, row.job))
    held = [sorted(row.stay.nodes.items()) for row in rows]
    ptr = np.append(0, np.cumsum([len(nodes) for nodes in held])).astype(np.int64)
    log = np.zeros(len(rows), layout.LOG)
    log["first"], log["end_node"], log["partner"] = ptr[:-1], ptr[1:], -1
    for line, row in zip(log, rows, strict=True):
        stay = row.stay
        line["job"], line["gpus"], line["start"] = row.job, row.gpus, stay.start
        line["restart"], line["end"] = stay.restart, -1 if stay.end is None else stay.end
        line["work"] = 0 if stay.end is None else row.done - row.before
    pairs = np.array([pair for nodes in held for pair in nodes], np.int64).reshape(-1, 2)
    w.state["log_rows"], w.state["log_nodes"] = len(rows), len(pairs)
    return w._replace(
        log=np.concatenate((log, w.log)), log_node=np.concatenate((pairs, w.log_node))
    )


def _after(w: World, r: int, row: Row, now: int) -> None:
    """The job after this stay, or within it."""
    job, given, stay = w.job[row.job], w.given[row.job], row.stay
    total, pass_work = int(given["work_total"]), int(given["pass_work"])
    if job["starts"] == 0:
        job["first_start"] = stay.start
    job["starts"] += 1
    job["entered"] = stay.start
    if stay.end is not None:
        job["attained"] += row.gpus * (stay.end - stay.start)
        job["done"] = job["kept"] = row.done
        job["entered"], job["phase"] = stay.end, layout.PENDING
        job["passes"] = row.done // pass_work
        if row.done == total:
            job["phase"], job["passes"] = layout.ENDED, -(-total // pass_work)
            w.finished[row.job] = stay.end
            w.state["unfinished"] -= 1
        return
    job["phase"], job["gpus"], job["row"], job["stay"] = layout.RUNS, row.gpus, r, stay.start
    job["rate"] = job["alone"] = row.rate
    job["done"], job["since"], job["stay_done"] = row.before, stay.start + stay.restart, row.before
    passes, begun = row.done // pass_work, row.before
    kept = passes * pass_work
    if stay.work is not None:
        begun, job["done"], job["since"] = row.done, row.done, now
    elif kept > begun:  # a pass ends at an instant, maybe with work of the next one
        kept = begun - row.rate * ((begun - kept) // row.rate)
    job["passes"], job["kept"] = passes, max(row.before, kept)
    job["next"] = job["since"] - (begun - min((passes + 1) * pass_work, total)) // row.rate


def _preempted(w: World, rows: list[Row]) -> None:
    """Count stays that ended before the job, but for resizes (a stay from the same instant on).

    Stays lack the node of a zero-slot task: any that is removed at their end is taken for it.
    """
    removed = {(int(c["when"]), int(c["which"])) for c in w.change if c["kind"] == layout.REMOVE}
    resized = {(row.job, row.stay.start) for row in rows}
    for row in rows:
        end = row.stay.end
        if end is not None and end != w.finished[row.job]:
            lost = any((end, node) in removed for node in row.stay.nodes or range(len(w.node)))
            w.job["preempted"][row.job] += lost or (row.job, end) not in resized


def _take_gpus(w: World, rows: list[Row]) -> None:
    """Hold the GPUs of open stays, and zero-slot units of zero-slot tasks."""
    last_change = {int(c["which"]): c["kind"] for c in w.change[: w.state["changes"][0]]}
    absent = [node for node, kind in last_change.items() if kind == layout.REMOVE]
    for row in rows:
        if row.stay.end is not None:
            continue
        place = f"start: job {format_value(row.stay.job)}"
        if row.gpus == 0:  # on a drained node only if no other has a unit: the task goes on
            units = np.where(w.node["free_units"] > 0, 1 + w.node["takes"], 0)
            units[absent] = 0
            if not units.any():
                raise InputError(f"{place}: no zero-slot unit is free for it")
            w.job["unit"][row.job] = np.argmax(units)
            w.node["free_units"][np.argmax(units)] -= 1
        for n, gpus in sorted(row.stay.nodes.items()):
            node = w.node[n]
            if n in absent:
                raise InputError(f"{place}: node {n} was removed before now")
            if node["free"] < gpus:
                raise InputError(
                    f"{place}: holds {gpus} GPUs of node {n}, where the stays before leave "
                    f"{node['free']} of {node['capacity']}"
                )
            node["free"] -= gpus
            if len(w.supply) > 0:
                w.supply[n, 1:] -= gpus * w.demand[row.job]
                if (w.supply[n, 1:] < 0).any():
                    raise InputError(f"{place}: node {n} has too few CPUs or memory for it")


def _arrived(w: World, workload: Workload, now: int) -> None:
    """Show jobs that were submitted before now, as many of a group as its limit allows."""
    w.state["arrivals"] = arrivals = int(np.searchsorted(workload.submit, now))
    active = []
    for j in np.flatnonzero(w.job["phase"][:arrivals] != layout.ENDED).tolist():
        job, group = w.job[j], w.group[workload.group[j]]
        if job["phase"] == layout.UNBORN:
            job["phase"], job["entered"] = layout.PENDING, workload.submit[j]
            if 0 <= group["limit"] <= group["visible"]:
                job["phase"], job["entered"] = layout.HIDDEN, 0
                if group["head"] < 0:
                    group["head"] = j
                else:
                    w.job["partner"][group["tail"]] = j
                group["tail"] = j
                continue
        group["visible"] += 1
        active.append(j)
        if job["phase"] == layout.RUNS:
            w.assigned[len(active) - 1] = job["gpus"] or -1
    w.active[: len(active)] = active
    w.state["active"] = len(active)
