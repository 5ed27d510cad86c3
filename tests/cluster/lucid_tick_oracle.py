"""Lucid's tick simulator, written second by second from its rules: the slow twin of the events."""

from __future__ import annotations

from dataclasses import dataclass, field

NODE = 8


@dataclass(eq=False)
class Ticking:
    """A job of the tick simulator."""

    number: int
    submit: int
    gpus: int
    remaining: int
    duration: int
    attained: int = 0
    runs: bool = False
    where: dict[int, int] = field(default_factory=dict)
    end: int = -1
    preemptions: int = 0


def place(free: list[int], gpus: int) -> dict[int, int] | None:
    """Up to 8 GPUs on the fullest node that fits, more on idle nodes and the emptiest other."""
    if gpus <= NODE:
        fits = [(f, n) for n, f in enumerate(free) if f >= gpus]
        return {min(fits)[1]: gpus} if fits else None
    idle = [n for n, f in enumerate(free) if f == NODE]
    whole, rest = divmod(gpus, NODE)
    if len(idle) < whole:
        return None
    where = dict.fromkeys(idle[:whole], NODE)
    if rest:
        others = [(-f, n) for n, f in enumerate(free) if n not in where and f >= rest]
        if not others:
            return None
        where[min(others)[1]] = rest
    return where


def simulate(
    policy: str, submit: list[int], gpus: list[int], duration: list[int], nodes: int
) -> tuple[list[int], list[int]]:
    """Finish times and numbers of preemptions; `policy` is fifo, sjf, srtf or las.

    Every second: ends, arrivals, one decision.
    """
    jobs = [
        Ticking(i, *row, row[2]) for i, row in enumerate(zip(submit, gpus, duration, strict=True))
    ]
    free, pending, running = [NODE] * nodes, [], []  # type: ignore[var-annotated]
    queues = policy in ("fifo", "sjf")
    coming, time = 0, 0
    while any(job.end < 0 for job in jobs):
        for job in list(running):
            if job.remaining == 0:
                job.end = time
                running.remove(job)
                leave(job, free)
            else:
                job.remaining -= 1
                job.attained += job.gpus
                if queues and job.remaining == 0:
                    # without preemption, the end is at start + duration
                    job.end = time
                    running.remove(job)
                    leave(job, free)
        while coming < len(jobs) and jobs[coming].submit == time:
            pending.append(jobs[coming])
            coming += 1
        if queues:
            pending.sort(key=lambda job: job.submit if policy == "fifo" else job.duration)
            while pending and start(pending[0], free):
                running.append(pending.pop(0))
        elif policy == "srtf" or time % 60 == 0:
            decide(policy, pending, running, free, nodes * NODE)
        time += 1
    return [job.end for job in jobs], [job.preemptions for job in jobs]


def decide(
    policy: str, pending: list[Ticking], running: list[Ticking], free: list[int], counter: int
) -> None:
    """The walk, then preemptions, then starts."""
    if policy == "srtf":
        walk = sorted(pending + running, key=lambda job: job.remaining)
    else:
        walk = sorted(running + pending, key=lambda job: (job.attained > 18000, job.submit))
    selected, dropped = [], []
    for job in walk:
        if job.gpus <= counter:
            counter -= job.gpus
            if not job.runs:
                selected.append(job)
        elif job.runs:
            dropped.append(job)
    for job in dropped:
        leave(job, free)
        running.remove(job)
        pending.append(job)
        job.preemptions += 1
        job.remaining += 40 if job.gpus <= NODE else 60
    for job in selected:
        if start(job, free):
            pending.remove(job)
            running.append(job)


def start(job: Ticking, free: list[int]) -> bool:
    """Place a job if it can be consolidated."""
    where = place(free, job.gpus)
    if where is None:
        return False
    for node, gpus in where.items():
        free[node] -= gpus
    job.where, job.runs = where, True
    return True


def leave(job: Ticking, free: list[int]) -> None:
    """Give a job's GPUs back."""
    for node, gpus in job.where.items():
        free[node] += gpus
    job.where, job.runs = {}, False
