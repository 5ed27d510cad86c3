"""Step plan, uneven sampler and variable-batch loader, alone and under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import TensorDataset, default_collate  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.elastic import StepPlan, VariableBatchLoader  # noqa: E402

SAMPLES = [
    {"x": np.full((2, 3), i, np.float32), "pair": (i, str(i)), "raw": torch.tensor(i)}
    for i in range(6)
]


@st.composite
def plans(draw: Any) -> StepPlan:
    """Plans of 1 to 5 ranks; some have nothing to do, or less than a sample a step."""
    ranks = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks).filter(any))
    return StepPlan(counts, draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks)))


@given(plans())
def test_plan(plan: StepPlan) -> None:
    """Every sample has its step, no batch is too large, sizes and totals are even, scales fit."""
    steps, total = range(plan.steps), sum(plan.counts)
    pairs = list(zip(plan.counts, plan.batches, strict=True))
    assert plan.steps == max(-(-n // b) for n, b in pairs)
    for r, (count, batch) in enumerate(pairs):
        sizes = [plan.size(r, k) for k in steps]
        assert sum(sizes) == count
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1
    totals = [plan.total(k) for k in steps]
    assert totals == [total // plan.steps + (k < total % plan.steps) for k in steps]
    for k in steps:
        sizes = [plan.size(r, k) for r in range(plan.ranks)]
        assert sum(sizes) == totals[k] > 0
        assert plan.sum_scale(k) == plan.ranks / totals[k]


@given(plans(), st.integers(0, 5))
def test_partition(plan: StepPlan, epoch: int) -> None:
    """Each sample once a pass; what a step computes does not depend on how ranks share it."""
    ranks, data = range(plan.ranks), sum(plan.counts)
    samples = TensorDataset(torch.arange(data))
    alone = VariableBatchLoader(samples, StepPlan([data], [data]), 0, epoch=epoch, seed=3)
    one = alone.order().tolist()
    assert sorted(one) == list(range(data))
    alone.set_epoch(epoch + 1)
    assert data < 10 or alone.order().tolist() != one
    loaders = [VariableBatchLoader(samples, plan, r, epoch=epoch, seed=3) for r in ranks]
    at = 0
    for k, batches in enumerate(zip(*loaders, strict=True)):
        assert {scale for _, scale in batches} == {plan.sum_scale(k)}
        assert [len(batch[0]) for batch, _ in batches] == [plan.size(r, k) for r in ranks]
        union = torch.cat([batch[0] for batch, _ in batches])
        assert union.tolist() == one[at : at + plan.total(k)]
        more = plan.ranks + 1
        others = [next(loaders[0].steps(k, (r, more))) for r in range(more)]  # on other ranks
        assert [i for (x,), n in others for i in x.tolist()[:n]] == union.tolist()
        at += plan.total(k)


@given(plans(), st.integers(5, 60), st.integers(1, 6))
def test_resample(plan: StepPlan, data: int, passes: int) -> None:
    """Shards are fixed and disjoint; over any passes a rank draws each of its samples equally."""
    owners = []
    for r, count in enumerate(plan.counts):
        shard = len(range(r, data, plan.ranks))
        sampler, jumping = (
            VariableBatchLoader(range(data), plan, r, exposure="resample") for _ in range(2)
        )
        times: Counter[int] = Counter()
        for epoch in range(passes):
            sampler.set_epoch(epoch)
            drawn = sampler.order().tolist()
            times.update(drawn)
            assert len(drawn) == count
            assert set(Counter(drawn).values()) <= {count // shard, count // shard + 1}
        often = [*times.values(), *[0] * (shard - len(times))]
        assert len(often) == shard
        assert max(often) - min(often) <= 1
        jumping.set_epoch(passes - 1)
        assert jumping.order().tolist() == drawn
        owners.append(set(times))
    assert sum(map(len, owners)) == len(set().union(*owners))


@pytest.mark.parametrize("exposure", ["partition", "resample"])
def test_a_new_loader_repeats_the_plans(exposure: str) -> None:
    """A new loader that is given the plans of earlier passes draws as the old one."""
    data, plan = TensorDataset(torch.arange(30)), StepPlan([20, 10], [4, 4])
    passes = [(1, StepPlan([12, 18], [3, 5])), (3, StepPlan([7, 23], [3, 5])), (4, None)]
    for r in range(2):
        old, new = (VariableBatchLoader(data, plan, r, seed=9, exposure=exposure) for _ in "ab")
        for epoch, then in passes:
            old.set_epoch(epoch, then)
            before = [(batch[0].tolist(), scale) for batch, scale in old]
        for epoch, then in passes:
            new.set_epoch(epoch, then)
        assert [(batch[0].tolist(), scale) for batch, scale in new] == before
        new.set_epoch(5, StepPlan([10] * 3, [4] * 3))
        assert new.pointers == (0, 0, 0)  # other ranks: shards start anew


def test_order_is_what_it_was() -> None:
    """Independent of global random states, and the same on every platform and version."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampler = VariableBatchLoader(range(10), StepPlan([7, 3], [9, 9]), 0, epoch=2, seed=4)
    assert sampler.order().tolist() == [9, 6, 0, 7, 5, 4, 1]
    loader = VariableBatchLoader(SAMPLES, StepPlan([4, 2], [2, 1]), 1)
    assert len(list(loader)) == len(loader) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_any_data() -> None:
    """What torch's DataLoader gives; an empty batch has the same structure, types and shapes."""
    plan = StepPlan([5, 1], [2, 2])
    full, few = (VariableBatchLoader(SAMPLES, plan, r) for r in range(2))
    want = default_collate([SAMPLES[i] for i in full.order().tolist()[: plan.size(0, 0)]])
    (first, scale), *_ = full
    assert scale == 1.0
    assert first["pair"][1] == want["pair"][1]
    assert torch.equal(first["x"], want["x"])
    empty = next(batch for k, (batch, _) in enumerate(few) if not plan.size(1, k))
    assert empty["x"].shape == (0, 2, 3)
    assert empty["pair"][0].dtype == torch.int64
    assert empty["raw"].shape == (0,)
    tensors = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loaders = [  # direct indexing, a process, a DataLoader
        VariableBatchLoader(tensors, StepPlan([4, 2], [2, 1]), 0, **options)
        for options in ({}, {"num_workers": 1}, {"collate_fn": default_collate})
    ]
    for batches in zip(*loaders, strict=True):
        for row in zip(*(batch for batch, _ in batches), strict=True):
            assert all(torch.equal(row[0], other) for other in row)


def proof(rank: int, folder: str, code: str, port: str) -> None:
    """In each of 3 processes compare gradients with one process; on 2 run a script as torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    # an even split, very uneven ones, fewer samples than steps, none at all
    for counts, batches in (
        ([16, 16], [4, 4]), ([30, 1], [4, 4]), ([13, 0, 20], [3, 1, 6]), ([2, 40, 9], [1, 16, 2]),
    ):  # fmt: skip
        if rank < len(counts):
            group = pair if len(counts) == 2 else dist.group.WORLD
            plan = StepPlan(counts, batches)
            same(rank, plan, "partition", torch.float64, 1e-12, group)
            same(rank, plan, "resample", torch.float32, 1e-6, group)
    dist.destroy_process_group()
    ours = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(ours)
    if rank < 2:
        with open(f"{folder}/{rank}", "w") as out, contextlib.redirect_stdout(out):
            exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})


def same(rank: int, plan: StepPlan, exposure: str, dtype: Any, near: float, group: Any) -> None:
    """Train twice, with all ranks and alone, comparing every gradient."""
    some = torch.Generator().manual_seed(1)
    size = sum(plan.counts)
    data = TensorDataset(
        torch.randn(size, 1, 4, 4, dtype=dtype, generator=some),
        torch.randint(3, (size,), generator=some),
    )
    torch.manual_seed(2)
    alone = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    ).to(dtype)
    model = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    ours, theirs = (torch.optim.Adam(m.parameters(), 0.01) for m in (model, alone))
    loaders = [VariableBatchLoader(data, plan, r, exposure=exposure) for r in range(plan.ranks)]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            (x, y), scale = batches[rank]
            ours.zero_grad()
            (scale * cross_entropy(model(x), y, reduction="sum")).backward()
            x, y = (torch.cat(parts) for parts in zip(*(b for b, _ in batches), strict=True))
            theirs.zero_grad()
            cross_entropy(alone(x), y).backward()
            for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert (mine.grad - other.grad).abs().max() <= near, (plan, exposure)
            ours.step()
            theirs.step()


def test_under_ddp(tmp_path: Path) -> None:
    """Two and three ranks, uneven and empty batches, several steps; the page's script trains."""
    page = Path(__file__).parents[2] / "docs/clusters/ddp-loop.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo"])  # slow: once, not thrice
    rest = (str(tmp_path), code, str(port))
    torch.multiprocessing.start_processes(proof, rest, nprocs=3, start_method="forkserver")
    printed = (tmp_path / "0").read_text().splitlines()
    first, last = (float(line.split()[1]) for line in (printed[0], printed[-1]))
    assert len(printed) == 5
    assert last < 0.6 * first


GOOD = StepPlan([3, 3], [2, 2])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: StepPlan(5, [1]), "counts: expected a list of integers"),
        (lambda: StepPlan([0, 0], [1, 1]), "counts: all are 0"),
        (lambda: StepPlan([1, 1], [1, 0]), "batches: rank 1: .* got 0"),
        (lambda: VariableBatchLoader([1] * 7, GOOD, 0), "add up to 6, but the data have 7"),
        (lambda: VariableBatchLoader([1] * 6, GOOD, 0, seed=2**32), "seed: "),
        (lambda: VariableBatchLoader([1] * 6, GOOD, 0, exposure="all"), 'exposure: .* "all"'),
        (lambda: VariableBatchLoader([1], GOOD, 0, exposure="resample"), "use fewer"),
    ],
)  # fmt: skip
def test_refusals(call: Any, says: str) -> None:
    """A sentence with the field and the value."""
    with pytest.raises(InputError, match=says):
        call()
