"""Measuring: every case is there, bytes are what a hand computes, jobs stay as they are."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from arraypipe_models import CUTS, adamw, build_model, data, loss, sgd
from runs import array_trainer
from torch import nn

from optsched import InputError
from optsched.arraypipe import measure
from optsched.arraypipe.job import Job
from optsched.arraypipe.profile import Profile, from_tree

if TYPE_CHECKING:
    from collections.abc import Sequence


def profile_of(
    jobs: Sequence[Job], model: Any = build_model, cuts: Any = CUTS, **given: Any
) -> Profile:
    """The profile of a trainer."""
    options = {key: given.pop(key, value) for key, value in
               (("device", None), ("loss", loss), ("data", data))}  # fmt: skip
    return array_trainer(model, jobs=jobs, stages=cuts, **options).profile(**given)


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
    assert all(min(b.forward, b.backward, b.recompute) > 0 for b in profile.blocks)
    assert profile.sizes() == [5, 8, 16]
    assert [stage.name for stage in profile.stages] == ["stage0", "4", "6"]
    assert from_tree(msgspec.to_builtins(profile)) == profile
    device = profile.device
    assert (device.kind, device.threads) == ("cpu", torch.get_num_threads())
    assert device.torch == str(torch.__version__)
    assert re.match(r"20\d\d-\d\d-\d\dT", device.date)
    assert profile.link is None  # one device
    # a job of two micro-batches runs the larger
    rows = [(job.name, job.batch, job.recompute) for job in profile.jobs]
    assert rows == [("job0", 8, False), ("job1", 16, True), ("small", 5, False), ("job3", 8, False)]


def test_state_bytes(profile: Profile) -> None:
    """Parameters, moments with their step counters, buffers; by hand for the first stage."""
    weights, buffers = 4 * (6 * 12 + 12 + 12 + 12 + 12 * 12 + 12), 4 * (12 + 12) + 8
    first = profile.stages[0]
    assert first.gradients_bytes == 2 * weights  # those of the job in fp64
    assert first.state[0] == first.state[2] == 3 * weights + 6 * 4 + buffers
    assert first.state[1] == 2 * weights + buffers
    assert first.state[3] == 2 * (3 * weights) + 6 * 4 + 2 * 4 * 24 + 8


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
    assert found.block(0, n).output_bytes == 4 * n * 12
    assert found.block(0, n).gradient_bytes == 4 * n * 12
    assert found.block(1, n).output_bytes == 0  # the loss leaves no device


def kept(profile: Profile, stage: int, batch: int) -> tuple[int, int]:
    """Bytes from F to B without and with recomputation."""
    block = profile.block(stage, batch)
    return block.saved_bytes, block.input_bytes


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


class Large(nn.Module):
    """A layer that runs out of memory in its forward."""

    def forward(self, x: Any) -> Any:
        """Raise as the allocator of a GPU does."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_out_of_memory_is_a_sentence() -> None:
    """It names the stage, and what would help."""
    jobs = [Job(seed=1, batch_size=8, optimizer=sgd)]
    sentence = r"profile: stage 1 \(1\): does not fit .* use more stages, smaller"
    with pytest.raises(InputError, match=sentence):
        profile_of(jobs, lambda: nn.Sequential(nn.Linear(6, 4), Large()), [1])


def test_given_sizes_and_a_split_backward_are_measured() -> None:
    """Sizes once each; I and W beside B, and the problem with weight blocks."""
    given = array_trainer(plain, data, jobs=[Job(1, 12, sgd)], stages=[2], loss=loss)
    found = given.profile(sizes=[16, 12, 16], split_backward=True)
    assert found.sizes() == [12, 16]
    assert kept(found, 0, 12)[0] == 12 * (4 * 6 + 4 * 12)
    with pytest.raises(InputError, match="micro-batches of 8 samples"):
        found.block(0, 8)
    array = found.problem(split_backward=True)
    assert array.weight is not None and array.weight.min() > 0
    for sizes, sentence in (
        ([], "sizes: expected a list"), ("8", "sizes: expected a list"),
        ([8, 0], r"sizes\[1\]: expected an integer in 1\.\..*, got 0"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^{sentence}"):
            given.profile(sizes=sizes)


def test_ranks_measure_their_stages() -> None:
    """Each has the tensors of its stages only, and the form of a boundary from another rank."""
    jobs = [Job(1, 8, adamw), Job(2, 6, sgd)]
    given = array_trainer(build_model, data, jobs=jobs, stages=CUTS, loss=loss)
    meeting, values = Barrier(2, timeout=60), dict[int, Any]()

    def rank(number: int, local: list[int]) -> Profile:
        class Group:
            size = 1

            def all(self, value: Any) -> list[Any]:
                meeting.wait()
                values[number] = value
                meeting.wait()
                return [values[0], values[1]]

            def agree(self, make: Any) -> Any:
                return make()

        return measure.measure(given, torch.device("cpu"), local=local, group=Group())

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(rank, (0, 1), ([0, 2], [1]))
    whole = profile_of(jobs)
    assert found.stages == whole.stages and found.jobs == whole.jobs
    for one, other in zip(found.blocks, whole.blocks, strict=True):
        for key in ("stage", "batch", "saved_bytes", "input_bytes", "output_bytes"):
            assert getattr(one, key) == getattr(other, key)


def test_a_frozen_base_counts_once() -> None:
    """Shared bytes of frozen tensors that jobs have in common; states without them."""
    base = plain()
    base[0].requires_grad_(False)
    jobs = [Job(j, 8, sgd) for j in range(3)]
    frozen = 4 * (6 * 12 + 12)
    for model, count in ((lambda: deepcopy(base), frozen), (plain, 0)):
        found = profile_of(jobs, model, [2])
        whole = profile_of(jobs[:1], model, [2]).stages[0].state[0]
        first = found.stages[0]
        assert (first.shared_bytes, first.state) == (count, (whole - count,) * 3)
        assert found.standing_bytes()[0] == 3 * (whole - count) + count + first.gradients_bytes
