"""Measuring: every case is there, bytes are what a hand computes, jobs stay as they are."""

from __future__ import annotations

import json
import re
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from arraypipe_models import CUTS, adamw, build_model, data, loss, sgd, trainer
from runs import run
from torch import nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, random_schedule
from optsched.arraypipe.job import Job
from optsched.arraypipe.profile.document import Profile, from_tree, to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


def profile_of(
    jobs: Sequence[Job], model: Any = build_model, cuts: Any = CUTS, **given: Any
) -> Profile:
    """Measure, whatever the machine's noise."""
    devices = given.pop("devices", None)
    options = {"loss": given.pop("loss", loss), "data": given.pop("data", data), "stages": cuts}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ArrayTrainer(model, jobs=jobs, devices=devices, **options).profile(**given)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Four jobs: three sizes, two optimizers, micro-batches, recomputation, clipping."""
    return profile_of([
        Job(seed=1, batch_size=8, optimizer=adamw),
        Job(seed=2, batch_size=16, optimizer=sgd, recompute=True),
        Job(seed=3, batch_size=9, optimizer=adamw, microbatches=2, name="small"),
        Job(seed=4, batch_size=8, optimizer=adamw, precision="fp64"),
    ])  # fmt: skip


def test_every_case_is_measured(profile: Profile) -> None:
    """F, B, R per (stage, micro-batch size, precision); U per (stage, optimizer, precision)."""
    cases = {(b.stage, b.batch, b.dtype) for b in profile.blocks}
    sizes = [(8, "fp32"), (16, "fp32"), (5, "fp32"), (8, "fp64")]
    assert cases == {(s, *size) for s in range(3) for size in sizes}
    assert profile.jobs[0].optimizer == profile.jobs[2].optimizer == "AdamW(weight_decay)"
    assert profile.jobs[1].optimizer == "SGD(momentum, nesterov)"
    optimizers = {(job.optimizer, job.precision) for job in profile.jobs}
    updates = {(u.stage, u.optimizer, u.dtype) for u in profile.updates}
    assert updates == {(s, *one) for s in range(3) for one in optimizers} and len(optimizers) == 3
    for _, times in profile.cases():
        assert 10 <= times.n <= 50
        assert 0 < times.minimum_ns <= times.median_ns
    assert profile.sizes() == [5, 8, 16]
    assert [stage.name for stage in profile.stages] == ["0", "4", "6"]
    assert from_tree(json.loads(to_bytes(profile))) == profile
    device = profile.device
    assert (device.kind, device.threads) == ("cpu", torch.get_num_threads())
    assert device.torch == str(torch.__version__)
    assert re.match(r"20\d\d-\d\d-\d\dT", device.date)
    assert profile.links.host.bandwidth > 10**6
    # a job of two micro-batches runs the larger
    rows = [(job.name, job.batch, job.recompute) for job in profile.jobs]
    assert rows == [("job0", 8, False), ("job1", 16, True), ("small", 5, False), ("job3", 8, False)]


def test_state_bytes(profile: Profile) -> None:
    """Parameters, moments with their step counters, buffers; by hand for the first stage."""
    weights, buffers = 4 * (6 * 12 + 12 + 12 + 12 + 12 * 12 + 12), 4 * (12 + 12) + 8
    first = profile.stages[0]
    assert first.parameters_bytes == 2 * weights  # those of the job in fp64
    assert first.state[0] == first.state[2] == 3 * weights + 6 * 4 + buffers
    assert first.state[1] == 2 * weights + buffers
    assert first.state[3] == 2 * (3 * weights) + 6 * 4 + 2 * 4 * 24 + 8


def test_a_schedule_of_another_profile_runs_with_a_warning(profile: Profile) -> None:
    """The one that the problem was made of counts, but for one that the trainer has measured."""
    import optsched

    jobs = [Job(j, 8, sgd) for j in range(2)]
    device = msgspec.structs.replace(profile.device, threads=profile.device.threads + 1)
    other = replace(profile, device=device)
    given, further = trainer(jobs), trainer(jobs)
    schedule = optsched.solve(given.problem(profile, objective="makespan"), "dispatch").schedule
    assert schedule is not None
    assert profile.made(schedule) and not optsched.verify(schedule)
    further.problem(other, objective="makespan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(given, schedule, 1)
        run(trainer(jobs), schedule, 1)
        run(given, random_schedule([1, 1], 3), 1)
    sentence = f"profile {profile.sha256[:12]}, not with {other.sha256[:12]}"
    with pytest.warns(UserWarning, match=sentence):
        run(further, schedule, 1)
    given.last_profile = other
    with pytest.warns(UserWarning, match=sentence):
        run(given, schedule, 1)


def plain(width: int = 12) -> nn.Sequential:
    """Two stages whose bytes a hand can count."""
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 4))


def test_saved_bytes_count_storages_once() -> None:
    """What Linear, ReLU and BatchNorm keep; weights are not counted, nor a tensor twice."""
    n = 8
    jobs = [Job(seed=1, batch_size=n, optimizer=sgd)]
    found = profile_of(jobs, plain, [2], loss=lambda y, _: y.square().mean())
    # Linear keeps its input, ReLU its output, which is the output of the stage
    assert kept(found, 0, n) == (4 * n * 6 + 4 * n * 12, 4 * n * 6)
    saved, inputs = kept(found, 1, n)
    buffers = 4 * (12 + 12) + 8
    assert inputs == 4 * n * 12 + buffers
    # BatchNorm: input, mean and 1/deviation; Linear: its input; square: its base; loss and weight
    scalars = saved - 4 * n * 28 - 4 * 24  # that the loss keeps, such as the exponent of a square
    assert 0 <= scalars <= 64
    assert found.bytes_of("output", 0, n, "fp32") == 4 * n * 12
    assert found.bytes_of("gradient", 0, n, "fp32") == 4 * n * 12
    assert found.bytes_of("output", 1, n, "fp32") == 0  # the loss leaves no device


def kept(profile: Profile, stage: int, batch: int) -> tuple[int, int]:
    """Bytes from F to B without and with recomputation."""
    return (
        profile.bytes_of("saved", stage, batch, "fp32"),
        profile.bytes_of("input", stage, batch, "fp32"),
    )


def test_bytes_grow_with_the_batch_and_times_are_predicted() -> None:
    """Three sizes given: bytes between them are exact, times are said to be predicted."""
    jobs = [Job(seed=1, batch_size=12, optimizer=sgd)]
    found = profile_of(jobs, plain, [2], sizes=[16, 4, 8, 4])
    assert found.sizes() == [4, 8, 16]
    assert kept(found, 0, 12)[0] == 12 * (4 * 6 + 4 * 12)
    assert found.duration("F", 0, 12).predicted
    assert not found.duration("F", 0, 8).predicted
    assert found.fit_error is not None
    assert found.problem().activation[0, 0] == 12 * (4 * 6 + 4 * 12)


def test_bf16_has_masters() -> None:
    """Weights in two bytes; master weights and the moments of the optimizer in four."""
    jobs = [Job(seed=1, batch_size=8, optimizer=sgd, precision="bf16")]
    found = profile_of(jobs, plain, [2])
    weights = 6 * 12 + 12
    assert found.stages[0].state[0] == (2 + 4 + 4) * weights
    assert found.bytes_of("output", 0, 8, "bf16") == 2 * 8 * 12
    assert found.jobs[0].precision == "bf16"


def test_updates_that_wait_for_all_stages() -> None:
    """Clipping and metric schedulers make the problem's updates global; others do not."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    one = torch.optim.lr_scheduler.OneCycleLR
    jobs = [
        # five steps and no more: profiling takes none of them
        Job(seed=1, batch_size=4, optimizer=sgd, scheduler=lambda o: one(o, 0.1, total_steps=5)),
        Job(seed=2, batch_size=4, optimizer=sgd, scheduler=plateau),
        Job(seed=3, batch_size=4, optimizer=sgd, clip_norm=1.0),
    ]
    found = profile_of(jobs, plain, [2])
    assert [job.update for job in found.jobs] == ["fused", "global", "global"]
    assert len({job.optimizer for job in found.jobs}) == 2  # clipping costs something
    assert found.problem().update_mode == "global"
    assert found.problem(jobs=[0]).update_mode == "fused"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_events() -> None:
    """Same cases, same bytes; memory and name of the device are known."""
    jobs = [Job(seed=1, batch_size=8, optimizer=sgd)]
    found = profile_of(jobs, plain, [2], devices=["cuda"])
    here = profile_of(jobs, plain, [2])
    assert found.device.kind == "cuda"
    assert found.device.memory_bytes > 2**30
    assert [title for title, _ in found.cases()] == [title for title, _ in here.cases()]
    assert found.stages[0].state[0] == here.stages[0].state[0]
    assert kept(found, 0, 8) == kept(here, 0, 8)
    assert found.problem(memory="device").memory.min() > 2**29


class Jumpy(nn.Module):
    """A layer that takes its time in every other round."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        """Nothing, or 20 ms; a round has three forwards, and two come before the first."""
        self.calls += 1
        time.sleep(0.02 * (self.calls // 3 % 2))
        return x


def test_a_case_that_scatters_is_repeated_and_named() -> None:
    """Up to 50 times, then a warning that names it."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 4), Jumpy(), nn.Linear(4, 4))

    jobs = [Job(seed=1, batch_size=4, optimizer=sgd)]
    named = r"F of stage 1 \(1\), micro-batch 4, fp32: IQR [^;]* after 50 repeats"
    with pytest.warns(UserWarning, match=named):
        found = ArrayTrainer(build, data, jobs=jobs, stages=[1], loss=loss).profile()
    (block,) = (b for b in found.blocks if b.stage == 1)
    assert block.forward.n == 50
    assert block.forward.noisy


def fixed(job: Job, start: int) -> Any:
    """Batches of one size, whatever is asked for."""
    return data(replace(job, batch_size=8), start)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repeats": 9}, r"repeats: expected an integer in 10\.\..*, got 9"),
    ({"repeats": True}, "repeats: expected"),
    ({"sizes": []}, "sizes: expected a list"),
    ({"sizes": "8"}, "sizes: expected a list"),
    ({"sizes": [8, 0]}, r"sizes\[1\]: expected an integer in 1\.\..*, got 0"),
    ({"sizes": [8, 2.0]}, r"sizes\[1\]: expected"),
    # two sizes with inputs of one shape would be one size measured twice
    ({"sizes": [4, 8], "data": fixed}, r"sizes: data gives inputs of one shape .* 4 and 8"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_wrong_arguments_are_refused(given: dict[str, Any], sentence: str) -> None:
    """The sentence names the argument."""
    with pytest.raises(InputError, match=f"^{sentence}"):
        profile_of([Job(seed=1, batch_size=8, optimizer=sgd)], **given)
