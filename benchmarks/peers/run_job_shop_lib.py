"""job_shop_lib's CP-SAT solver.

It has no worker count, seed or bound: these are set on, and read from, its inner CP-SAT.
"""

from __future__ import annotations

from protocol import answer, request, versions


def main() -> None:
    """Build, solve, answer."""
    asked, clock = request()
    from job_shop_lib import JobShopInstance

    durations = [[p for _, p in job] for job in asked["jobs"]]
    machines = [[k for k, _ in job] for job in asked["jobs"]]
    from job_shop_lib.constraint_programming import ORToolsSolver
    from job_shop_lib.exceptions import NoSolutionFoundError
    from watched_cpsat import Watched

    parameters = {"num_workers": asked["workers"], "random_seed": asked["seed"]}
    watched = Watched(clock, asked["seconds"], {**parameters, **asked["options"]})
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
    answer(starts=starts, versions=versions("job-shop-lib", "ortools"),
           **watched.proof())  # fmt: skip


if __name__ == "__main__":
    main()
