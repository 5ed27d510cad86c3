"""PyJobShop, its default solver; budget and trace by watching the CP-SAT inside."""

from __future__ import annotations

from protocol import answer, request, versions


def main() -> None:
    """Build with its modelling interface, solve, answer."""
    asked, clock = request()
    from pyjobshop import Model, SolveStatus
    from watched_cpsat import Watched

    watched = Watched(clock, asked["seconds"], asked["options"])
    model = Model()
    shop = asked["jobs"]
    machines = [model.add_machine() for _ in range(1 + max(k for job in shop for k, _ in job))]
    for chain in shop:
        job = model.add_job()
        before = None
        for machine, duration in chain:
            task = model.add_task(job)
            model.add_mode(task, machines[machine], duration)
            if before is not None:
                model.add_end_before_start(before, task)
            before = task
    result = model.solve(
        time_limit=asked["seconds"], display=False, num_workers=asked["workers"],
        random_seed=asked["seed"],
    )  # fmt: skip
    found = result.status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)
    answer(
        starts=[task.start for task in result.best.tasks] if found else None,
        versions=versions("pyjobshop", "ortools"),
        **watched.proof(),
    )


if __name__ == "__main__":
    main()
