"""Hand-made pipelines as starts of rolling jobs: Chimera's two directions."""

from __future__ import annotations

from random import Random

import optsched
from optsched import JobArray, pipelines, verify
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched_solvers.shop import hand_made


def two_ways(seed: int) -> tuple[JobArray, JobArray]:
    """A job as `pipelines.chimera` takes it, and as an array on Chimera's layout."""
    rng = Random(seed)
    forward, backward, activation = ([[rng.randint(1, 6) for _ in range(4)]] for _ in range(3))
    job = JobArray(
        forward, backward, activation=activation, micro_batches=rng.choice([4, 8, 12]),
        update=rng.choice([1, 2]),
    )  # fmt: skip
    down = [0, 1, 2, 3]
    place = [down[::-1] if m % 2 else down for m in range(int(job.micro_batches[0]))]
    return job, job.replace(place=[place], microbatch_order="free", update_mode="block")


def test_chimera_is_offered_to_rolling_jobs() -> None:
    """Repeated with the overlap that its orders allow; what does not fit is not offered."""
    for seed in range(6):
        job, array = two_ways(seed)
        made = pipelines.chimera(job)
        rolling = array.with_objective("period")
        assert array.graph().same_graph(made) and made.sequences is not None
        monitor = Monitor(Limits(iterations=1))
        hand_made.offer(rolling, monitor)
        assert monitor.objective == rolling.evaluate_orders(made.sequences)
        assert monitor.history[-1].source == "pipelines.chimera"
        assert monitor.solution is not None
        assert verify(rolling.scheduled(monitor.solution)) == []
        tight = Monitor(Limits(iterations=1))
        hand_made.offer(rolling.replace(memory=int(array.activation.max())), tight)
        assert tight.objective is None


def test_auto_is_no_worse_than_rolling_chimera() -> None:
    """Where list schedules are worse by a fifth."""
    down = [0, 1, 2, 3]
    array = JobArray(
        [[3, 2, 6, 1]], [[1, 1, 3, 3]], activation=[[1, 5, 5, 4]], micro_batches=12,
        memory=[6, 20, 20, 6], microbatch_order="free", objective="period",
        place=[[down[::-1] if m % 2 else down for m in range(12)]],
    )  # fmt: skip
    result = optsched.solve(array, "auto", iterations=1, workers=1)
    assert result.objective is not None and result.objective <= 76
