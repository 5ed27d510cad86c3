"""Random requests, and how tests ask searches for GPUs."""

from __future__ import annotations

import random

from oracles.best_gpus import (
    Tables,
    all_subsets,
    policy_of,
    share,
    sizes_of,
    state_of,
)

import optsched
from optsched.bandwidth.models.model import BandwidthModel
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.topology.state import ClusterState, Job


def problem_of(seed: int, most: int = 11, **rest):  # type: ignore[no-untyped-def]
    """A random request."""
    rng = random.Random(seed)
    gaps = rng.choice([0, 0, 0.2])
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), gaps=gaps, levels=seed % 2 > 0)
    for _ in range(100):
        state = state_of(rng, model.cluster)
        if all(model.known(job.gpus) is not None for job in state.jobs):
            break
    else:
        state = ClusterState.idle(model.cluster)
    k = rng.randint(1, len(state.free))
    traffic = rng.choice(["given", "idle", "moderate", "heavy"])
    return optsched.GpuPlacement(state, model, k, traffic=traffic, **rest), model


def ruled_problem(seed: int, **fields):  # type: ignore[no-untyped-def]
    """A random request with rules."""
    rng = random.Random(seed)
    problem, model = problem_of(seed, 9, **fields)
    if "policy" in fields:
        return problem
    policy = policy_of(rng, model.cluster)
    return problem.changed(policy=policy)


def four_by_eight(seed: int, ruled: bool = True) -> GpuPlacement:
    """Four hosts of eight GPUs and tenants; the policy is drawn too."""
    rng = random.Random(seed)
    model = Tables(rng, [8] * 4, levels=seed % 2 > 0)
    free = rng.sample(range(32), rng.randint(2, 32))
    busy = [gpu for gpu in range(32) if gpu not in free]
    rng.shuffle(busy)
    jobs = []
    while busy:
        count = min(len(busy), rng.choice([1, 2, 4, 8, 16]))
        jobs.append(Job(f"j{len(jobs)}", tuple(busy[:count])))
        busy = busy[count:]
    return GpuPlacement(
        ClusterState(model.cluster, tuple(free), tuple(jobs)), model, rng.randint(1, len(free)),
        traffic=rng.choice(["idle", "moderate", "heavy"]),
        policy=policy_of(rng, model.cluster) if ruled else None,
    )  # fmt: skip


class WithoutTables(BandwidthModel):
    """The same bandwidths, no tables."""

    def __init__(self, model: BandwidthModel) -> None:
        self.model, self.cluster = model, model.cluster

    def predict(self, selection):  # type: ignore[no-untyped-def]
        """As the model."""
        return self.model.predict(selection)


def judged(problem, model, gpus):  # type: ignore[no-untyped-def]
    """Value by the oracle, None if not known."""
    return share(problem.state, model.known, problem.demands, gpus)


def optimum(problem):  # type: ignore[no-untyped-def]
    """The best value of all subsets by the oracle; None if none is allowed and known."""
    values = all_subsets(
        problem.state, problem.model.known, problem.demands, problem.k, problem.policy,
    )  # fmt: skip
    return max((value for value, _ in values), default=None)


def solved(problem, solver, **options):  # type: ignore[no-untyped-def]
    """Value and GPUs of a solver object's answer, or None."""
    result = optsched.solve(problem, solver, options=options, time_limit=600)
    if result.schedule is None:
        assert result.status in ("unknown", "infeasible")
        return None
    assert result.status == "feasible" or result.objective == result.lower_bound
    gpus = problem.chosen(result.schedule)
    assert problem.faults(gpus) == []
    assert problem.evaluate(result.schedule) == result.objective
    return -result.objective, tuple(gpus)
