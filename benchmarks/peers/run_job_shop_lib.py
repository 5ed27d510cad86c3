"""job_shop_lib's CP-SAT solver; with ``speed``, its dispatcher and graph on one instance."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from protocol import answer, request, versions

if TYPE_CHECKING:
    from collections.abc import Callable

NOTE = "has no worker count, seed or bound: set on, and read from, its inner CP-SAT"


def main() -> None:
    """Build, solve, answer."""
    asked, clock = request()
    from job_shop_lib import JobShopInstance

    durations = [[p for _, p in job] for job in asked["jobs"]]
    machines = [[k for k, _ in job] for job in asked["jobs"]]
    if asked["solver"] == "speed":
        answer(rows=speed(JobShopInstance.from_matrices(durations, machines)), ended=clock.now(),
               versions=versions("job-shop-lib"))  # fmt: skip
        return
    from job_shop_lib.constraint_programming import ORToolsSolver
    from job_shop_lib.exceptions import NoSolutionFoundError
    from watched_cpsat import Watched

    parameters = {"num_workers": asked["workers"], "random_seed": asked["seed"]}
    watched = Watched(clock, asked["seconds"], {**parameters, **asked["options"]})
    clock.restart()
    instance = JobShopInstance.from_matrices(durations, machines)
    starts = None
    try:
        schedule = ORToolsSolver(max_time_in_seconds=asked["seconds"]).solve(instance)
    except NoSolutionFoundError:
        pass
    else:
        first, total = [], 0
        for job in asked["jobs"]:
            first.append(total)
            total += len(job)
        starts = [0] * total
        for order in schedule.schedule:
            for done in order:
                starts[first[done.job_id] + done.position_in_job] = done.start_time
    answer(starts=starts, versions=versions("job-shop-lib", "ortools"), note=NOTE,
           **watched.proof())  # fmt: skip


def speed(instance: Any) -> list[tuple[str, float]]:
    """Milliseconds of one dispatching schedule and of its disjunctive graph, medians of three."""
    from job_shop_lib.dispatching.rules import DispatchingRuleSolver
    from job_shop_lib.graphs import build_disjunctive_graph

    solver = DispatchingRuleSolver("most_work_remaining")
    return [
        ("one rule", _median_ms(lambda: solver.solve(instance))),
        ("graph", _median_ms(lambda: build_disjunctive_graph(instance))),
    ]


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


if __name__ == "__main__":
    main()
