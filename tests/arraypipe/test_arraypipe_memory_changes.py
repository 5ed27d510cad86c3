"""Jobs and plans that come later and need more memory than there is."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import trainer  # noqa: E402
from test_arraypipe_memory import alone, beside, job, room, slots_of  # noqa: E402

from optsched import JobArray  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe.job import JobFailed  # noqa: E402
from optsched.arraypipe.life import changes  # noqa: E402
from optsched.arraypipe.life.changes import Rescheduling  # noqa: E402
from optsched.arraypipe.life.replanner import Replanner  # noqa: E402
from optsched.arraypipe.train_alone import differences  # noqa: E402
from optsched.model.schedule import Rows  # noqa: E402
from optsched.solving.solution import PeriodicOrders  # noqa: E402

pytestmark = pytest.mark.torch

# changes that need more memory than there is

STAGED = JobArray([[3, 4, 2]] * 4, [[6, 7, 5]] * 4, objective="period")


def staged(problem: JobArray, breadth: bool) -> Any:
    """Every job's forwards before any backward, or one job after the other."""
    n, orders = problem.n_jobs, []
    for d in range(3):
        forward, backward = [6 * j + d for j in range(n)], [6 * j + 5 - d for j in range(n)]
        pairs = zip(forward, backward, strict=True)
        orders.append([*forward, *backward] if breadth else [i for pair in pairs for i in pair])
    return problem.scheduled(PeriodicOrders(Rows.of(orders), np.zeros(6 * n, np.int64)))


@pytest.mark.parametrize(
    ("breadth", "recompute", "sentence"),
    [
        (False, False, ""),
        (True, False, r"3 states could not leave their slots on gpu0, which has 1; use"),
        (True, True, r"gpu0 would need \d+ bytes and has \d+"),
    ],
)
def test_a_plan_that_needs_more_memory_is_not_adopted(
    breadth: bool, recompute: bool, sentence: str, made: list[Any],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The log says why, and the run goes on with the plan that it has; else it changes over."""
    jobs = [job((s, 8, "sgd", 1), recompute=recompute) for s in range(4)]
    start = staged(STAGED, False)
    changed: list[Any] = []

    class Solver(Replanner):
        def submit(self, problem: Any, start: Any, time_limit: float) -> None:
            self._request["answer"] = staged(problem, breadth)

    honest = Rescheduling.poll

    def poll(planner: Any, segment: Any) -> Any:
        change = honest(planner, segment)
        changed.extend([] if change is None else [change])
        return change

    monkeypatch.setattr(changes, "Replanner", Solver)
    monkeypatch.setattr(Rescheduling, "_gain", lambda *given: 1)
    monkeypatch.setattr(Rescheduling, "poll", poll)
    array = trainer(jobs, memory=room(jobs, 1.0) + beside(jobs, start))
    with caplog.at_level(logging.WARNING, "optsched"):
        result = array.run(
            start, 8, replan=STAGED, on_error="raise",
            on_step=lambda job, t, x: job.seed == 0 and t == 1 and job.stop(),
        )  # fmt: skip
    assert slots_of(made[-1])
    assert bool(changed) == (not sentence)
    assert re.search(sentence, caplog.text)
    for j, n in enumerate([2, 8, 8, 8]):
        assert differences(result.trained[j], alone((j, 8, "sgd", 1), n)) == []


@pytest.mark.parametrize("way", ["queue", "refill", "strict"])
def test_a_job_that_needs_more_slots_fails_alone(way: str, made: list[Any]) -> None:
    """Without recompute, among jobs that recompute: its sentence says so, the others are exact."""
    jobs = [job((s, 8, "sgd", 1), recompute=True) for s in range(3)]
    late = [job((s, 8, "sgd", 1), recompute=s != 3) for s in (3, 4)]
    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=1)
    array = trainer(jobs, memory=room(jobs, 1.0) + beside(jobs, schedule) + 2000)

    def on_step(one: Job, t: int, x: float) -> None:
        if (one.seed, t) == (0, 1):
            one.stop()

    if way in ("queue", "strict"):
        array.take_in(late[0]), array.take_in(late[1])
    rest = list(late)

    def refill(ended: Job) -> Job | None:
        return rest.pop(0) if rest else None

    given: dict[str, Any] = {"refill": refill} if way == "refill" else {}
    if way == "strict":
        with pytest.raises(JobFailed, match=r"could not leave their slots .* recompute=True"):
            array.run(schedule, 4, queue=True, on_error="raise", on_step=on_step)
        return
    result = array.run(schedule, 4, queue=way == "queue", on_step=on_step, **given)
    assert slots_of(made[-1])
    assert [one.status for one in array.jobs] == ["stopped", "done", "done", "failed", "done"]
    assert "could not leave their slots on device0" in str(array.jobs[3].error)
    for j, n in ((0, 2), (1, 4), (2, 4), (4, 4)):
        assert differences(result.trained[j], alone((j, 8, "sgd", 1), n)) == []
