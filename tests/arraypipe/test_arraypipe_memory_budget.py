"""What counts against the bytes of a device beside the states: gradients and activations."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, data, sgd, trainer  # noqa: E402
from test_arraypipe_memory import room, stages_of, weigh  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe.memory import manager  # noqa: E402
from optsched.arraypipe.memory.budget import CUDA_CONTEXT, CUDA_STREAM, reserved  # noqa: E402
from optsched.arraypipe.memory.engines import PCIE_4, HostLink  # noqa: E402
from optsched.arraypipe.memory.residency import slot_bytes  # noqa: E402
from optsched.arraypipe.memory.slots import layout_of  # noqa: E402
from optsched.arraypipe.memory.types import State  # noqa: E402
from optsched.arraypipe.runtime import worker  # noqa: E402
from optsched.arraypipe.runtime.state import JobRun  # noqa: E402
from optsched.arraypipe.train_alone import differences  # noqa: E402

pytestmark = pytest.mark.torch


def test_gradients_and_activations_count_without_bytes_in_the_schedule() -> None:
    """A schedule that says nothing of bytes leaves less room for states, by both."""
    jobs = [Job(s, 64, adamw) for s in range(3)]
    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=0)
    assert not schedule.acquire.any()
    (table,) = weigh(jobs, schedule)
    largest = max(sum(4 * p.numel() for _, p in s.parameters) for s in stages_of(jobs[0]))
    all_of_one = sum(4 * p.numel() for s in stages_of(jobs[0]) for _, p in s.parameters)
    assert largest <= table.gradients <= 3 * all_of_one
    (double,) = weigh([Job(s, 128, adamw) for s in range(3)], schedule)
    assert double.gradients == table.gradients
    assert 64 * (6 + 12 + 4) * 4 <= table.activations < double.activations
    (less,) = weigh([Job(s, 64, adamw, recompute=True) for s in range(3)], schedule)
    assert 0 < less.activations < table.activations
    assert less.workspace > table.workspace == 0
    limit = slot_bytes([State(0, s.index, layout_of(s, "").bytes) for s in stages_of(jobs[0])])
    with pytest.raises(InputError, match=r"0 of 3 jobs would fit\n(.*\n)*gradients, at the"):
        trainer(jobs, memory=min(sum(limit), table.total)).run(schedule, 1)


def test_gradients_of_all_micro_batches_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment of a run do more bytes of gradients exist than the budget has."""
    jobs = [Job(s, 8, sgd, microbatches=4) for s in range(3)]
    seen: list[int] = []
    honest, weighed = worker.blocks.update, manager.memory_of

    def update(*given: Any) -> None:
        stages = [stage for run in runs for stage in run.stages]
        gradients = [p.grad for stage in stages for _, p in stage.parameters]
        seen.append(sum(gradient.nbytes for gradient in gradients if gradient is not None))
        honest(*given)

    runs: list[Any] = []

    def memory_of(given: Any, *rest: Any) -> Any:
        runs[:] = given
        return weighed(given, *rest)

    for seed in range(4):
        schedule = random_schedule([4] * 3, 3, place=[0, 0, 0], seed=seed)
        (table,) = weigh(jobs, schedule)
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(worker.blocks, "update", update)
            patch.setattr("optsched.arraypipe.training_run.memory_of", memory_of)
            trainer(jobs, memory=10**6).run(schedule, 3, on_error="raise")
        assert max(seen) == table.gradients > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_failed_job_gives_its_gradients_back(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Not before its last update is over, but before it loses its seat; the others are exact."""
    failed: list[Any] = []
    honest = JobRun.fail

    def fail(run: Any, *rest: Any) -> Any:
        failed.append((run, [p.grad is not None for p in run.model.parameters()]))
        return honest(run, *rest)

    def bad_data(job: Job, start: int) -> Any:
        for k, (x, y) in enumerate(data(job, start)):
            yield x, y + 100 * (job.seed == 1 and k == 2) * (torch.arange(len(y)) > len(y) // 2)

    def jobs() -> list[Job]:
        return [
            Job(0, 8, adamw, microbatches=2),
            Job(1, 8, adamw, microbatches=2, clip_norm=0.1, precision=precision),
        ]

    monkeypatch.setattr(JobRun, "fail", fail)
    held = []
    for seed in range(5):  # whose orders can be run
        failed.clear()
        schedule = random_schedule([2] * 2, 3, seed=seed, update=[1])
        trainer(jobs(), data=bad_data).run(schedule, 4)
        ((run, gradients),) = failed
        held += gradients
        assert run.total_norm is None
        assert run.updates == 2 * 3  # of all stages
        for stage in run.stages:
            assert all(p.grad is None for _, p in (*stage.parameters, *stage.trained))
    assert any(held)


def test_devices_on_one_gpu_share_its_context_and_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of streams do not; a GPU's link is measured both ways, a CPU's is guessed."""
    one, two, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    places = [one] * 4 + [two]
    assert sum(reserved(one, places) for _ in range(4)) == CUDA_CONTEXT + 4 * CUDA_STREAM
    assert reserved(two, places, 2**20) == CUDA_CONTEXT + 2**20 + CUDA_STREAM
    assert reserved(cpu, [cpu] * 2, 2**20) == 0
    ways = iter([(40.0, 5000.0), (20.0, 7000.0)])
    monkeypatch.setattr(manager, "link_speed", lambda source, target, most: next(ways))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert manager._link_of(one, 4) == HostLink(10e9, 5e9, 7e-6)
    assert manager._link_of(cpu, 4) is PCIE_4


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
