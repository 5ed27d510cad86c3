"""What must, and must not, change the best bandwidth: demands, names, bystanders, room."""

from __future__ import annotations

import random
from dataclasses import replace

from depth import depth

import optsched
from optsched.bandwidth import Cluster, ClusterState, Dispatcher, Job
from optsched.testing.best_gpus import Tables, sizes_of, state_of

SEEDS = range(depth(40, 120))


def case(seed: int) -> tuple[random.Random, Tables, ClusterState, int]:
    """A model, a state whose jobs all tell their demand, and a number of GPUs."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, 10))
    state = state_of(rng, model.cluster)
    jobs = tuple(replace(job, demand=rng.randint(1, 300) * 1_000_000) for job in state.jobs)
    return rng, model, state.with_jobs(jobs), rng.randint(1, len(state.free))


def best(model: Tables, state: ClusterState, k: int, traffic: str = "given") -> int:
    """The best bandwidth."""
    return Dispatcher(model.cluster, model, traffic=traffic).choose(state, k)[1]  # type: ignore[arg-type]


def test_demands_only_take() -> None:
    """More demand never gives more; without any the best is the best alone."""
    moved = 0
    for seed in SEEDS:
        rng, model, state, k = case(seed)
        value, idle = best(model, state, k), best(model, state, k, "idle")
        assert 0 <= value <= idle
        more = state.with_jobs(
            replace(job, demand=(job.demand or 0) + rng.randint(0, 10**8)) for job in state.jobs
        )
        assert best(model, more, k) <= value
        moved += value < idle
    assert moved  # contention was there to be seen


def test_bystanders_change_nothing() -> None:
    """A job within one host, or one that asks nothing; a GPU more never harms."""
    for seed in SEEDS:
        _, model, state, k = case(seed)
        value = best(model, state, k)
        for gpu in state.down[:1]:
            alone = state.with_jobs([*state.jobs, Job("alone", (gpu,), 10**9)])
            assert best(model, alone, k) == value
            more = ClusterState(
                state.cluster, (*state.free, gpu), state.jobs, tuple(set(state.down) - {gpu})
            )
            assert best(model, more, k) >= value
        if len(state.down) > 1:
            silent = state.with_jobs([*state.jobs, Job("silent", state.down[:2], 0)])
            assert best(model, silent, k) == value


def test_names_are_nothing() -> None:
    """Other names of hosts: the same GPUs, the same bandwidth."""
    for seed in SEEDS:
        _, model, state, k = case(seed)
        hosts = tuple(replace(host, name=f"z{host.name}") for host in model.cluster.hosts)
        old = model.cluster
        expected = Dispatcher(old, model).choose(state, k)
        again = Tables(random.Random(seed), sizes_of(random.Random(seed), 10))
        again.limit = model.limit  # type: ignore[method-assign]
        again.cluster = Cluster(hosts, old.types, old.levels)
        there = ClusterState(again.cluster, state.free, state.jobs, state.down)
        assert Dispatcher(again.cluster, again).choose(there, k) == expected


def test_whoever_solves_is_verified() -> None:
    """The chosen GPUs are free, as many as asked, and the schedule is silent."""
    for seed in SEEDS[:30]:
        _, model, state, k = case(seed)
        problem = optsched.GpuPlacement(state, model, k)
        result = optsched.solve(problem)
        (chosen,) = problem.chosen(result.schedule)
        again = problem.scheduled(problem.answer(result.schedule))
        assert problem.chosen(again) == [chosen] and again.same_graph(result.schedule)
        assert len(chosen) == k and set(chosen) <= set(state.free)
        assert optsched.verify(result.schedule) == [] and problem.check(result.schedule) == []
