"""Logs and workloads made by hand or at random, and slow twins of what is computed from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from optsched.cluster.results.run import Run
from optsched.cluster.workload.job import WORK, Job
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.workload import Workload
from optsched.cluster.world.log import HALF_A, HALF_B, WHOLE, Log
from optsched.cluster.world.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

Stay = dict[str, Any]


def stay(
    job: int,
    start: int,
    end: int,
    on: dict[int, int],
    *,
    restart: int = 0,
    half: int = WHOLE,
    work: int = 0,
    partner: int = -1,
) -> Stay:
    """One row of a log; `partner` is a position in the list that is given."""
    return {
        "job": job, "start": start, "end": end, "on": on, "restart": restart, "half": half,
        "work": work, "partner": partner,
    }  # fmt: skip


def log_of(stays: Sequence[Stay], jobs: int, preemptions: Sequence[int] | None = None) -> Log:
    """Rows sorted as a log has them; the last stay of a job is its end."""
    order = sorted(range(len(stays)), key=lambda i: (stays[i]["start"], stays[i]["job"]))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    rows = [stays[i] for i in order]

    def column(key: str) -> Any:
        return np.array([row[key] for row in rows], np.int64)

    finished = np.full(jobs, -1, np.int64)
    for row in rows:
        finished[row["job"]] = max(finished[row["job"]], row["end"])
    cells = [(n, row["on"][n]) for row in rows for n in sorted(row["on"])]
    half = column("half")
    return Log(
        job=column("job"),
        start=column("start"),
        end=column("end"),
        restart=column("restart"),
        gpus=np.array([sum(row["on"].values()) for row in rows], np.int64),
        half=half,
        work=column("work"),
        node_ptr=np.cumsum([0, *(len(row["on"]) for row in rows)]).astype(np.int64),
        node=np.array([n for n, _ in cells], np.int64),
        count=np.array([c for _, c in cells], np.int64),
        finished=finished,
        preemptions=np.array(preemptions or [0] * jobs, np.int64),
        partner=np.array([place[row["partner"]] for row in rows]) if half.any() else None,
    )


def run_of(
    jobs: Sequence[Job], nodes: Nodes, stays: Sequence[Stay], settings: Settings | None = None
) -> Run:
    """A run with this log; `jobs` sorted by submit time."""
    workload = Workload.of(jobs, name="by hand")
    return Run(workload, nodes, settings or Settings(), "hand", {}, log_of(stays, len(jobs)))


@st.composite
def runs(draw: st.DrawFn, sharing: bool = False) -> Run:
    """Random runs of a first-come first-served cluster with preemptions and resizes, by ticks.

    Every tick pending and running jobs are shuffled; what is drawn decides who stops, starts or
    changes size. Slow and simple on purpose: nothing is shared with the library.
    """
    caps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    n = draw(st.integers(1, 6))
    jobs = [
        {
            "submit": draw(st.integers(0, 6)),
            "left": draw(st.integers(1, 8)),
            "sizes": sorted(draw(st.sets(st.integers(1, max(caps)), min_size=1, max_size=2))),
        }
        for _ in range(n)
    ]
    jobs.sort(key=lambda job: job["submit"])
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    stays = _played(jobs, caps, random, sharing)
    made = [
        Job(
            name=f"j{i}",
            submit=job["submit"],
            sizes=tuple(job["sizes"]),
            work=max(1, job["done"]) * WORK,
        )
        for i, job in enumerate(jobs)
    ]
    for row in stays:
        row["work"] *= WORK
    return run_of(made, Nodes.of(caps), stays)


def _played(jobs: list[dict[str, Any]], caps: list[int], random: Any, sharing: bool) -> list[Stay]:
    free = list(caps)
    running: dict[int, int] = {}  # job -> its open row
    stays: list[Stay] = []
    for job in jobs:
        job["done"] = 0
    shared: dict[int, int] = {}  # row -> row it shares with now
    t = 0
    while any(job["left"] for job in jobs):
        for j in list(running):
            row = stays[running[j]]
            over = jobs[j]["left"] == 0
            if over or random.random() < 0.25:
                row["end"] = t
                mate = shared.pop(running[j], None)
                if mate is None:
                    for node, c in row["on"].items():
                        free[node] += c
                else:
                    del shared[mate]
                del running[j]
        waiting = [j for j, job in enumerate(jobs) if job["left"] and job["submit"] <= t]
        for j in random.permutation([j for j in waiting if j not in running]).tolist():
            size = int(random.choice(jobs[j]["sizes"]))
            again = any(row["job"] == j for row in stays)
            row = stay(j, t, -1, {}, restart=int(again and random.random() < 0.5))
            if sharing and random.random() < 0.6:
                mates = [
                    running[k] for k in running
                    if running[k] not in shared and stays[running[k]]["half"] != WHOLE
                    and sum(stays[running[k]]["on"].values()) == size
                ]  # fmt: skip
                if mates:
                    mate = int(random.choice(mates))
                    half = HALF_A if stays[mate]["half"] == HALF_B else HALF_B
                    row |= {"on": dict(stays[mate]["on"]), "half": half, "partner": mate}
                    shared[mate], shared[len(stays)] = len(stays), mate
            if not row["on"] and size <= sum(free):
                need = size
                for node in random.permutation(len(caps)).tolist():
                    if (c := min(free[node], need)) > 0:
                        row["on"][node] = c
                        free[node] -= c
                        need -= c
                if sharing and random.random() < 0.5:
                    row["half"] = HALF_A if random.random() < 0.5 else HALF_B
            if row["on"]:
                running[j] = len(stays)
                stays.append(row)
        for j in running:
            row = stays[running[j]]
            if t >= row["start"] + row["restart"]:
                jobs[j]["left"] -= 1
                g = sum(row["on"].values())
                row["work"] += g
                jobs[j]["done"] += g
        t += 1
    for row_number in running.values():
        stays[row_number]["end"] = t
    return stays


def held_at(run: Run, t: int) -> dict[int, int]:
    """GPUs of every node in use in [t, t + 1), shared ones once: by walking every stay."""
    log = run.log
    used = dict.fromkeys(range(len(run.nodes.gpus)), 0)
    now = [i for i in range(len(log.job)) if log.start[i] <= t < log.end[i]]
    for i in now:
        p = -1 if log.partner is None else int(log.partner[i])
        chain = p
        double = False
        while chain >= 0:  # somebody of the same GPUs, before this one, is still there
            double |= chain in now
            chain = int(log.partner[chain]) if log.partner is not None else -1
        if not double:
            for k in range(log.node_ptr[i], log.node_ptr[i + 1]):
                used[int(log.node[k])] += int(log.count[k])
    return used


def slow_percentile(values: Sequence[float], p: float) -> float:
    """Smallest x of the values with a share of at least p/100 at or below."""
    for x in sorted(values):
        if sum(v <= x for v in values) * 100 >= p * len(values):
            return x
    return math.nan
