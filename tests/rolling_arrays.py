"""Periodic schedules of job arrays made by hand, for tests of everything that looks at them."""

from __future__ import annotations

import numpy as np

from optsched.model.schedule import Arcs, Csr, Objective, Resource, Schedule


def rolling(
    first: list[int],
    forward: list[list[int]],
    backward: list[list[int]],
    period: int,
    *,
    copies: list[int] | None = None,
    activation: int = 0,
    memory: int = 0,
    switch: int = 0,
    lag: int = 0,
) -> Schedule:
    """Jobs that never wait: job j begins at ``first[j]``, copy a of it ``a * period / n`` later.

    F then goes down the stages, B up again, stage v on device v; what collides is the caller's
    affair. Arcs: the chain with lags, and the last gradient block of every stage to F of the next
    iteration there (of the next copy, or one cycle on).
    """
    jobs, stages = len(forward), len(forward[0])
    copies = copies or [1] * jobs
    columns: dict[str, list[int]] = {
        key: [] for key in ("duration", "job", "stage", "iteration", "acquire", "free", "begin")
    }
    arcs: list[tuple[int, int, int, int]] = []
    kind: list[str] = []
    for j in range(jobs):
        times = [*forward[j], *backward[j][::-1]]
        base = len(kind)
        for a in range(copies[j]):
            at = first[j] + a * period // copies[j]
            for step, duration in enumerate(times):
                back = step >= stages
                stage = 2 * stages - 1 - step if back else step
                values = (duration, j, stage, a, activation * (not back), activation * back, at)
                for key, value in zip(columns, values, strict=True):
                    columns[key].append(value)
                at += duration + (lag if step != stages - 1 else 0)
                i = len(kind)
                kind.append("FB"[back])
                if step:
                    arcs.append((i - 1, i, lag if step != stages else 0, 0))
                if back:
                    later = (a + 1) % copies[j]
                    arcs.append((i, base + 2 * stages * later + stage, 0, int(later == 0)))
    begin = np.array(columns.pop("begin"))
    fields = {key: np.array(column) for key, column in columns.items()}
    start = begin % period
    on = [np.flatnonzero(fields["stage"] == v) for v in range(stages)]
    return Schedule(
        name="rolling",
        resources=tuple(Resource(f"gpu{v}", memory) for v in range(stages)),
        op_resources=Csr.of([[v] for v in fields["stage"].tolist()]),
        arcs=Arcs.of(arcs),
        kind=np.array(kind),
        family=fields["job"],
        setup_out=np.full(len(kind), switch),
        offset=begin // period,
        period=period,
        sequences=Csr.of([ids[np.argsort(start[ids], kind="stable")].tolist() for ids in on]),
        start=start,
        objective=Objective("period", period, None, "feasible"),
        **fields,
    )


def equal_jobs(jobs: int, stages: int, f: int = 1, b: int = 2, **options: int) -> Schedule:
    """The optimum for equal jobs: job j starts at j(f + b); the period is max(K, S)(f + b)."""
    return rolling(
        [j * (f + b) for j in range(jobs)],
        [[f] * stages] * jobs,
        [[b] * stages] * jobs,
        max(jobs, stages) * (f + b),
        **options,  # type: ignore[arg-type]
    )
