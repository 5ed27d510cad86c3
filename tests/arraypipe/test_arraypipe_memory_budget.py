"""What counts against the bytes of a device beside the states: gradients and activations."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, data, sgd, trainer  # noqa: E402
from test_arraypipe_memory import room, stages_of, weigh  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe import memory as memory_module  # noqa: E402
from optsched.arraypipe.residency import slot_bytes  # noqa: E402
from optsched.arraypipe.states.slots import layout_of  # noqa: E402
from optsched.arraypipe.states.visits import State  # noqa: E402
from optsched.arraypipe.train_alone import differences  # noqa: E402
from optsched.arraypipe.worker import Resident  # noqa: E402

pytestmark = pytest.mark.torch


def gradients_of(one: Job) -> int:
    """Bytes of all gradients of a job."""
    return sum(4 * p.numel() for stage in stages_of(one) for _, p in stage.parameters)


def test_gradients_and_activations_count_without_bytes_in_the_schedule() -> None:
    """A schedule that says nothing of bytes leaves less room for states, by both."""
    jobs = [Job(s, 64, adamw) for s in range(3)]
    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=0)
    assert not schedule.acquire.any()
    (table,) = weigh(jobs, schedule)
    largest = max(sum(4 * p.numel() for _, p in s.parameters) for s in stages_of(jobs[0]))
    assert largest <= table.gradients <= 3 * gradients_of(jobs[0])
    (double,) = weigh([Job(s, 128, adamw) for s in range(3)], schedule)
    assert double.gradients == table.gradients
    assert 64 * (6 + 12 + 4) * 4 <= table.activations < double.activations
    (less,) = weigh([Job(s, 64, adamw, recompute=True) for s in range(3)], schedule)
    assert 0 < less.activations < table.activations
    assert less.workspace > table.workspace == 0
    limit = slot_bytes([State(0, s.index, layout_of(s, "").bytes) for s in stages_of(jobs[0])])
    block = r"most at [FB] of job \d, stage \d, micro-batch 0 \(operation \d+\): \d+ at once; "
    with pytest.raises(
        InputError, match=block + r"0 of 3 jobs would fit\n(.*\n)*gradients, at the"
    ):
        trainer(jobs, memory=min(sum(limit), table.total)).run(schedule, 1)


def test_gradients_of_all_micro_batches_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment of a run do more bytes of gradients exist than the budget has."""
    from optsched.arraypipe import worker

    jobs = [Job(s, 8, sgd, microbatches=4) for s in range(3)]
    seen = []
    honest = worker.blocks.update

    def update(*arguments: Any) -> None:
        seen.append(
            sum(
                p.grad.nbytes
                for run in runs
                for stage in run.stages
                for _, p in stage.parameters
                if p.grad is not None
            )
        )
        honest(*arguments)

    runs: list[Any] = []
    weighed = memory_module.memory_of

    def memory_of(given: Any, *rest: Any, **options: Any) -> Any:
        runs.extend(given)
        return weighed(given, *rest, **options)

    for seed in range(4):
        schedule = random_schedule([4] * 3, 3, place=[0, 0, 0], seed=seed)
        (table,) = weigh(jobs, schedule)
        seen.clear()
        runs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(worker.blocks, "update", update)
            patch.setattr("optsched.arraypipe.array_run.memory_of", memory_of)
            trainer(jobs, memory=10**6).run(schedule, 3, on_error="raise")
        assert max(seen) == table.gradients > 0


def test_weighing_changes_nothing() -> None:
    """The forward that measures leaves buffers and the generator as they were, and no graph."""
    from optsched.arraypipe.states import beside as memory_bytes

    jobs = [Job(s, 8, adamw) for s in range(2)]
    schedule = random_schedule([1] * 2, 3, seed=0)
    checked = []

    def memory_of(runs: Any, segments: Any, limit: int, **options: Any) -> Any:
        before = [b.clone() for run in runs for s in run.stages for b in s.buffers()]
        state = torch.get_rng_state()
        memory_bytes.beside_states(runs, segments[0], **options)
        after = [b for run in runs for s in run.stages for b in s.buffers()]
        checked.append(all(map(torch.equal, before, after)))
        checked.append(torch.equal(state, torch.get_rng_state()))
        checked.append(not any(s.kept for run in runs for s in run.stages))
        return Resident(runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optsched.arraypipe.array_run.memory_of", memory_of)
        trainer(jobs, memory=1).run(schedule, 1)
    assert checked == [True] * 3


def test_a_job_whose_first_forward_fails_is_not_weighed() -> None:
    """It ends alone, with little memory and with much; its seat counts like the largest."""

    def bad_data(job: Job, start: int) -> Any:
        for x, y in data(job, start):
            yield x, y + 100 * (job.seed == 1)

    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=0)
    good, bad = (
        weigh([Job(s, 8, adamw, recompute=True) for s in range(3)], schedule, data=feed)[0]
        for feed in (data, bad_data)
    )
    assert good.total == bad.total
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(3)]
    for limit in (10**6, good.total + room(jobs, 2)):
        jobs = [Job(s, 8, adamw, recompute=True) for s in range(3)]
        array = trainer(jobs, data=bad_data, memory=limit)
        result = array.run(schedule, 3)
        assert [job.status for job in jobs] == ["done", "failed", "done"]
        for j in (0, 2):
            assert differences(result.trained[j], array.train_alone(j, 3)) == []


def test_no_limit_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit there is no forward more."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("weighed")

    monkeypatch.setattr(memory_module, "beside_states", refuse)
    jobs = [Job(0, 8, sgd)]
    schedule = random_schedule([1], 3, seed=0)
    trainer(jobs).run(schedule, 1, on_error="raise")
    with pytest.raises(AssertionError, match="weighed"):
        trainer(jobs, memory=10**6).run(schedule, 1)


# GPUs and the page
