"""Random requests, for one job and for several, and how tests ask searches for GPUs."""

from __future__ import annotations

import random
from itertools import combinations
from typing import TYPE_CHECKING

import optsched
from optsched.bandwidth.model import BandwidthModel
from optsched.bandwidth.policy import Policy
from optsched.bandwidth.state import ClusterState, Job
from optsched.problems.gpus.problem import RATIO, GpuPlacement, Request
from optsched.testing.best_gpus import (
    Tables,
    all_subsets,
    contention_of,
    policy_of,
    share,
    sizes_of,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def problem_of(seed: int, most: int = 11, **rest):  # type: ignore[no-untyped-def]
    """A random request."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), gaps=rng.choice([0, 0, 0.2]))
    for _ in range(100):
        state = state_of(rng, model.cluster)
        if all(model.known(job.gpus) is not None for job in state.jobs):
            break
    else:
        state = ClusterState.idle(model.cluster)
    k = rng.randint(1, len(state.free))
    traffic = rng.choice(["given", "idle", "moderate", "heavy"])
    rest.setdefault("contention", contention_of(rng))
    return optsched.GpuPlacement(state, model, k, traffic=traffic, **rest), model


class WithoutTables(BandwidthModel):
    """The same bandwidths, no tables."""

    def __init__(self, model: BandwidthModel) -> None:
        self.model, self.cluster = model, model.cluster

    def predict(self, selection):  # type: ignore[no-untyped-def]
        """As the model."""
        return self.model.predict(selection)


def judged(problem, model, gpus):  # type: ignore[no-untyped-def]
    """Value by the oracle, None if not known."""
    return share(problem.state, model.known, problem.demands, gpus, problem.contention)


def optimum(problem):  # type: ignore[no-untyped-def]
    """The best value of all subsets by the oracle; None if none is allowed and known."""
    values = all_subsets(
        problem.state, problem.model.known, problem.demands, problem.k, problem.contention,
        problem.policy,
    )  # fmt: skip
    return max((value for value, _ in values), default=None)


def solved(problem, solver, **options):  # type: ignore[no-untyped-def]
    """Value and GPUs of a solver object's answer, or None."""
    result = optsched.solve(problem, solver, options=options, time_limit=600)
    if result.schedule is None:
        assert result.status in ("unknown", "infeasible")
        return None
    assert result.status == "feasible" or result.objective == result.lower_bound
    gpus = problem.chosen(result.schedule)[0]
    assert problem.faults([gpus]) == []
    assert problem.evaluate(result.schedule) == result.objective
    return -result.objective, tuple(gpus)


def random_batch(rng: random.Random, most: int = 9) -> GpuPlacement | None:
    """Two or three requests of at most eight free GPUs, tenants, rules; None if too few."""
    gaps = rng.choice([0, 0, 0.15])
    model = Tables(rng, sizes_of(rng, rng.randint(4, most)), gaps=gaps)
    state = state_of(rng, model.cluster)
    jobs = tuple(Job(job.name, job.gpus, rng.randint(0, 200) * 1_000_000) for job in state.jobs)
    state = ClusterState(state.cluster, state.free, jobs, state.down)
    free, many = len(state.free), rng.choice([2, 2, 3])
    if not many <= free <= 8:
        return None
    sizes = [1] * many
    for _ in range(rng.randint(0, free - many)):
        sizes[rng.randrange(many)] += 1
    rules = [policy_of(rng, model.cluster) if rng.random() < 0.4 else Policy() for _ in sizes]
    requests = [
        Request(f"r{i}", k, policy) for i, (k, policy) in enumerate(zip(sizes, rules, strict=True))
    ]
    return GpuPlacement(
        state, model, requests=requests, contention=contention_of(rng),
        objective=rng.choice(["sum", "max_min"]),
    )  # fmt: skip


def _tuples(free: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All disjoint subsets of these sizes."""
    if not sizes:
        yield ()
        return
    for chosen in combinations(free, sizes[0]):
        rest = [gpu for gpu in free if gpu not in chosen]
        for more in _tuples(rest, sizes[1:]):
            yield (chosen, *more)


def best_batch(problem: GpuPlacement) -> int | None:
    """The best objective of all disjoint tuples, by the oracle's own evaluation."""
    known: dict[tuple[int, ...], int | None] = {}
    state, model = problem.state, problem.model

    def bandwidth(gpus: tuple[int, ...]) -> int | None:
        if gpus not in known:
            known[gpus] = model.known(gpus)  # type: ignore[attr-defined]
        return known[gpus]

    alone = [
        max(
            (
                value
                for value, _ in all_subsets(
                    state, bandwidth, problem.demands, request.gpus, problem.contention,
                    request.policy,
                )
            ),
            default=0,
        )
        for request in problem.requests
    ]  # fmt: skip
    host_of = problem.cluster.host_of.tolist()
    best = None
    for chosen in _tuples(state.free, [request.gpus for request in problem.requests]):
        counts = [
            {host_of[g]: [host_of[x] for x in s].count(host_of[g]) for g in s} for s in chosen
        ]
        if any(
            request.policy.broken_by(problem.cluster, count)
            for request, count in zip(problem.requests, counts, strict=True)
        ):
            continue
        wanted = [bandwidth(gpus) for gpus in chosen]
        if None in wanted:
            continue
        values = []
        for r, gpus in enumerate(chosen):
            others = [o for o in range(len(chosen)) if o != r]
            jobs = (*state.jobs, *(Job(f"other {o}", chosen[o]) for o in others))
            around = state._changed(state.free, jobs)
            demands = (*problem.demands, *(wanted[o] for o in others))
            values.append(share(around, bandwidth, demands, gpus, problem.contention))  # type: ignore[arg-type]
        if None in values:
            continue
        if problem.objective == "sum":
            worth = sum(values)  # type: ignore[arg-type]
        else:
            worth = min(
                value * RATIO // most if most else RATIO  # type: ignore[operator]
                for value, most in zip(values, alone, strict=True)
            )
        best = worth if best is None else max(best, worth)
    return best
