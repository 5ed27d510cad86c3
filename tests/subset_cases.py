"""Random requests, models without tables, and how searches over subsets are asked in tests."""

from __future__ import annotations

import random

from random_subsets import Tables, contention_of, sizes_of, state_of

import optsched
from optsched.bandwidth import ClusterState
from optsched.bandwidth.model import BandwidthModel
from optsched.testing.best_gpus import all_subsets, share


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
    return optsched.SubsetChoice(state, model, k, traffic=traffic, **rest), model


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
