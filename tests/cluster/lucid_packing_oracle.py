"""Lucid's packing, second by second: the slow twin of the events."""

from __future__ import annotations

from dataclasses import dataclass, field

from lucid_tick_oracle import NODE, place

FULL = 10**6


@dataclass(eq=False)
class Packed:
    """A job of the tick simulator."""

    submit: int
    gpus: int
    kind: str
    cost: int
    remaining: int
    """Millionths of a second alone."""
    rate: int = FULL
    partner: Packed | None = None
    where: dict[int, int] = field(default_factory=dict)
    end: int = -1


def simulate(
    jobs: list[Packed],
    nodes: int,
    speeds: dict[tuple[str, str], tuple[int, int]],
    memory: dict[str, float],
    score: dict[str, float],
    limit: float,
) -> list[int]:
    """Finish times."""
    free, pending, running = [NODE] * nodes, [], []  # type: ignore[var-annotated]
    coming, time = 0, 0
    while any(job.end < 0 for job in jobs):
        for job in list(running):
            if job.remaining > 0:
                job.remaining -= job.rate
                continue
            job.end = time
            running.remove(job)
            if job.partner is not None:
                job.partner.rate, job.partner.partner = FULL, None
                continue
            for node, gpus in job.where.items():
                free[node] += gpus
        while coming < len(jobs) and jobs[coming].submit == time:
            pending.append(jobs[coming])
            coming += 1
        pending.sort(key=lambda job: job.cost)
        for job in list(pending):
            host = None
            if job.gpus <= NODE:
                for other in running:
                    if (
                        other.partner is None
                        and other.gpus == job.gpus
                        and (job.kind, other.kind) in speeds
                        and memory[other.kind] < limit - memory[job.kind]
                        and score[other.kind] + score[job.kind] <= 2
                        and job.cost <= 2 * other.cost
                    ):
                        host = other
                        break
            if host is not None:
                job.rate, host.rate = speeds[job.kind, host.kind]
                job.partner, host.partner, job.where = host, job, host.where
            else:
                where = place(free, job.gpus)
                if where is None:
                    continue
                for node, gpus in where.items():
                    free[node] -= gpus
                job.where = where
            pending.remove(job)
            running.append(job)
        time += 1
    return [job.end for job in jobs]
