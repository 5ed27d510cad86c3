"""What the ranks of a test do; run as a script, which forks them: torch is imported once.

``python process_cases.py FOLDER GROUPS`` with groups ``[ranks, case, arguments...]`` in JSON, one
after the other; what a case returns on rank 0 is written to ``FOLDER/<number>.json``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import sys
import time
import traceback
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would load it, in every rank
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import runs
import test_arraypipe_losses as loss_tests
from arraypipe_models import adamw, data, loss, sgd
from process_refusals import refused, sentences  # noqa: F401
from process_rows import (
    CHECKPOINTED,
    CUTS,
    MAKERS,
    PROCESSES,
    STEPS,
    Row,
    alone,
    build_model,
    compared,
    random_plan,
    random_rows,
    shape_of,
    trainer,
)
from runs import array_trainer
from streams_model import GPU, streams
from test_arraypipe_settings import plateau, tokens
from torch import nn

from optsched import InputError, JobArray, OptschedError, pipelines, verify
from optsched.arraypipe import Job, random_schedule, training_run
from optsched.arraypipe.distributed import backend, messages
from optsched.arraypipe.distributed import ranks as run_of_ranks
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.rescheduling import Rescheduling
from optsched.arraypipe.runtime.cuda_streams import BlockTimes
from optsched.arraypipe.runtime.state import PeerLost
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.plan.segments import Segment


# what tests ask for; every rank runs it, the answer of rank 0 counts


def exact(ranks: int, first: int, last: int) -> list[str]:
    """Differences over random plans, with 1 to 4 receives ahead."""
    found = []
    for seed in range(first, last):
        draw = random.Random(seed)
        rows, tied = random_rows(draw, 4), draw.random() < 0.3
        schedule = random_plan(shape_of(rows, ranks, draw), draw)
        with patched(messages, "AHEAD", 1 + seed % 4):
            result = runs.run(trainer(rows, tied), schedule, STEPS, on_error="raise", **PROCESSES)
        if dist.get_rank() == 0:
            lines = compared(result, rows, [STEPS] * len(rows), tied)
            found += [f"seed {seed}: {line}" for line in lines]
    return found


def streamed(ranks: int, case: str, first: int, last: int) -> list[str]:
    """Another case on simulated GPUs: finds what that finds, and races."""
    landed, read = [], BlockTimes.read
    with pytest.MonkeyPatch.context() as patch, streams(patch) as machine:
        patch.setattr(run_of_ranks, "gpu_or_cpu", lambda given: GPU)
        patch.setattr(BlockTimes, "read", lambda *given: landed.append(1) or read(*given))
        found = globals()[case](ranks, first, last) + machine.races
    return found if landed else [*found, "blocks have the times of the host"]


def replanned(ranks: int, first: int, last: int) -> list[str]:
    """Differences over runs whose plan is changed on the way, once or several times."""
    found, changes = [], 0
    for seed in range(first, last):
        draw = random.Random(seed)
        rows = random_rows(draw, 3)
        shape = shape_of(rows, ranks, draw)
        array = trainer(rows)
        plans = [array.plan(random_plan(shape, draw)) for _ in range(3)]
        waits = [draw.randrange(3) for _ in plans]

        def improved(_: object, segment: Segment, plans: Any = plans, waits: Any = waits) -> Any:
            if len(plans) > 1 and not waits[0]:
                waits.pop(0)
                plans.pop(0)
                return Change(plans[0], segment.slots)
            waits[0] -= 1
            return None

        with (
            patched(Rescheduling, "_improved", improved),
            patched(training_run, "FIRST_CYCLES", 1),
            patched(backend, "cycles_for", lambda segment, seconds: 1),
        ):
            result = runs.run(array, plans[0], 12, **PROCESSES)
        if dist.get_rank() == 0:
            found += [f"seed {seed}: {d}" for d in compared(result, rows, [12] * len(rows))]
            changes += 3 - len(plans)
    return found if changes > last - first else [f"only {changes} changes"]


def stopped(ranks: int) -> dict[str, Any]:
    """All jobs are stopped early; of 400 iterations almost none is filled with tombstones."""
    rows = [Row(0), Row(1, microbatches=2, optimizer="adamw"), Row(2)]
    known: list[tuple[int, int]] = []

    def on_step(job: Job, step: int, loss: float) -> None:
        known.append((job.seed, step))
        if (job.seed, step) in ((0, 2), (1, 4), (2, 9)):
            job.stop()

    array = trainer(rows)
    schedule = random_schedule([1, 2, 1], 4, place=[1, 0, 1, 0], seed=3)
    result = runs.run(array, schedule, 400, on_step=on_step, **PROCESSES)
    return {
        "differences": compared(result, rows, [3, 5, 10]),
        "status": [job.status for job in array.jobs],
        "known": sorted(known) == [(j, t) for j, n in enumerate([3, 5, 10]) for t in range(n)],
        "blocks": int(np.isin(result.trace.kind, ("F", "B")).sum()),
    }


def carried(ranks: int) -> dict[str, Any]:
    """Blocks alone, in an order that the clocks allow; another rank has its own blocks only."""
    rows = [Row(0), Row(1, microbatches=2, optimizer="adamw", clip=True), Row(2)]

    def on_step(job: Job, step: int, loss: float) -> None:
        if (job.seed, step) == (2, 3):
            job.stop()  # from here on its messages are tombstones

    schedule = random_schedule([1, 2, 1], 4, place=[0, 1, 1, 0], update=[1], together=[1], seed=5)
    result = runs.run(trainer(rows), schedule, 9, on_step=on_step, **PROCESSES)
    trace, found = result.trace, [None] * ranks
    dist.all_gather_object(found, trace.n_operations)
    assert trace.start is not None
    end, apart = trace.start + trace.duration, trace.provenance["clock_uncertainty_ns"]
    return {
        "violations": [str(violation) for violation in verify(trace)],
        "in order": bool((trace.start[trace.arcs.head] >= end[trace.arcs.tail] - apart).all()),
        "devices": len(result.report.devices),
        "others know their blocks": 0 < found[1] < found[0],
    }


def first_forwards(ranks: int) -> dict[str, Any]:
    """Jobs of the plan and one that joins fail in their first forward, or by their first batch.

    Each does so on one rank alone.
    """
    rows = [Row(0), Row(1), Row(2), Row(0, optimizer="adamw"), Row(4)]

    def bad_data(job: Job, start: int) -> Any:
        for x, y in data(job, start):
            if job.seed == 4 and dist.get_rank() == 1:
                raise OSError("unreadable")
            yield x[:, : 5 if job.seed == 1 + dist.get_rank() else 6], y

    array = array_trainer(
        build_model,
        bad_data,
        jobs=[row.job for row in (*rows[:2], rows[4])],
        stages=CUTS,
        loss=loss,
    )
    late = [row.job for row in rows[2:4]]
    result = runs.run(array, 
        random_schedule([1, 1, 1], 4, place=[1, 0, 1, 0], seed=8), 3,
        refill=lambda job: late.pop(0) if late else None, **PROCESSES,
    )  # fmt: skip
    found = []
    if dist.get_rank() == 0:
        for j, row in ((0, rows[0]), (4, rows[3])):
            found += differences(result.trained[j], alone(row, 3))
    return {"differences": found, "status": [job.status for job in array.jobs]}


def longer(ranks: int) -> list[str]:
    """Later batches are larger than the first, so that messages exceed what was posted."""
    rows = [Row(0, microbatches=2), Row(1, clip=True)]

    def growing(job: Job, start: int) -> Any:
        for t, (x, y) in enumerate(data(job, start), start):
            yield torch.cat([x] * (1 + 3 * t)), torch.cat([y] * (1 + 3 * t))

    array = array_trainer(
        build_model, growing, jobs=[row.job for row in rows], stages=CUTS, loss=loss
    )
    schedule = random_schedule([2, 1], 4, place=[1, 0, 1, 0], seed=2, update=[1], together=[1])
    result = runs.run(array, schedule, 4, **PROCESSES)
    return [
        d for j, t in enumerate(result.trained) for d in differences(t, array.train_alone(j, 4))
    ]


def replicated(ranks: int) -> list[str]:
    """Two replicas of two stages: everything that differs from DDP on two ranks, and refusals."""
    rank, steps = dist.get_rank(), 4

    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 4)
        )

    jobs = [
        Job(0, 8, sgd, microbatches=2),
        Job(1, 12, adamw, clip_norm=0.5),
        Job(2, 8, adamw, precision="fp64", scheduler=plateau),
    ]
    array = array_trainer(build, data, jobs=jobs, stages=[2], loss=loss)
    schedule = random_schedule([2, 1, 1], 2, update=[0, 1, 2], together=[1, 2], seed=3)
    folder = f"{sys.argv[1]}/replicas"
    how: dict[str, Any] = {"replicas": 2, "checkpoint": folder, **PROCESSES}
    with patched(training_run, "FIRST_CYCLES", 1):
        runs.run(array, schedule, 2, **how)
        result = runs.run(array, schedule, steps, resume=True, **how)
    found: list[str] = []
    pair = dist.new_group([0, 1])
    for j, job in enumerate(jobs if rank < 2 else ()):
        wanted = _in_ddp(build, job, steps, rank, pair)
        for name, p in wanted.items() if rank == 0 else ():
            if not torch.equal(result.trained[j].parameters[name], p):
                found.append(f"job {j}: {name} differs")
    norm = array_trainer(build_model, data, jobs=[Job(0, 8, sgd)], stages=[5], loss=loss)
    order, wanted = random_schedule([1], 2), "module '1' of job job0 (BatchNorm1d)"
    rows = sentences(ranks, lambda: runs.run(norm, order, 1, replicas=2, **PROCESSES))
    return found + [sentence for sentence in rows if wanted not in sentence]


def replicas_end(ranks: int) -> dict[str, Any]:
    """Two replicas: a job that is stopped by a callback, and one that fails on one rank."""

    def batches(job: Job, start: int) -> Any:
        for t, (x, y) in enumerate(data(job, start), start):
            yield x, y + 100 * (job.seed == 9 and t == 2 and dist.get_rank() == 3)

    def on_step(job: Job, step: int, loss: float) -> None:
        if (job.seed, step) == (0, 2):
            job.stop()

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

    array = array_trainer(
        build, batches, jobs=[Job(0, 8, sgd), Job(1, 8, adamw)], stages=[2], loss=loss
    )
    schedule, how = random_schedule([1, 1], 2, seed=3), {"replicas": 2, **PROCESSES}
    with patched(training_run, "FIRST_CYCLES", 1):
        result = runs.run(array, schedule, 9, on_step=on_step, **how)
    bad = array.with_jobs([Job(0, 8, sgd), Job(9, 8, sgd)])
    return {
        "early": 3 <= len(result.losses[0]) < len(result.losses[1]) == 9,
        "status": [job.status for job in array.jobs],
        "failed": sentences(ranks, lambda: runs.run(bad, schedule, 9, **how)),
    }


def _in_ddp(build: Any, job: Job, steps: int, rank: int, group: Any) -> dict[str, torch.Tensor]:
    """The parameters of a job that two ranks train with torch's DistributedDataParallel."""
    torch.manual_seed(job.seed)
    model = build().to(torch.float64 if job.precision == "fp64" else torch.float32)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = None if job.scheduler is None else job.scheduler(optimizer)
    batches = data(job, 0)
    for _ in range(steps):
        pairs = zip(*(t.tensor_split(2)[rank].tensor_split(job.microbatches)
                      for t in next(batches)), strict=True)  # fmt: skip
        optimizer.zero_grad()
        parts, total = list(pairs), 0.0
        for m, (x, y) in enumerate(parts):
            share = len(x) / sum(len(x) for x, _ in parts)
            x = x.to(torch.float64) if job.precision == "fp64" else x
            with ddp.no_sync() if m < len(parts) - 1 else nullcontext():
                value = loss(ddp(x), y) * share
                value.backward()
            total += value.item()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        mean = torch.tensor(total / 2, dtype=torch.float64)
        dist.all_reduce(mean, group=group)
        if scheduler is not None:
            scheduler.step(float(mean))
    return dict(model.named_parameters())


def transformers_models(ranks: int, names: list[str]) -> list[str]:
    """Everything in which models of transformers differ from the inline backend."""
    import hf_models

    found = []
    for name in names:
        build = hf_models.builder(name, **({"num_hidden_layers": 4} if ranks == 4 else {}))
        jobs = [Job(1, 4, adamw, microbatches=2), Job(2, 4, sgd, recompute=True)]
        array = array_trainer(build, hf_models.loader(name), jobs=jobs, stages=ranks)
        schedule = random_schedule([2, 1], ranks, seed=1)
        result = runs.run(array, schedule, 2, on_error="raise", **PROCESSES)
        if dist.get_rank() == 0:
            inline = runs.run(array, schedule, 2, on_error="raise")
            pairs = zip(result.trained, inline.trained, strict=True)
            found += [f"{name}: {line}" for a, b in pairs for line in differences(a, b)]
    return found


def nothing_left(ranks: int) -> list[int]:
    """Models and process groups that are still there after runs: one done, one refused."""
    models: list[Any] = []

    def build() -> nn.Module:
        model = build_model()
        models.append(weakref.ref(model))
        return model

    array = array_trainer(build, data, jobs=[Row(0, optimizer="adamw").job], stages=CUTS, loss=loss)
    schedule = random_schedule([1], 4, place=[0, 1, 0, 1])
    gc.collect()
    gc.disable()
    before = len(dist.distributed_c10d._world.pg_map)
    runs.run(array, schedule, 2, **PROCESSES)
    try:
        runs.run(array, schedule, 2 + dist.get_rank(), **PROCESSES)
    except InputError:
        after = len(dist.distributed_c10d._world.pg_map)
    alive = sum(model() is not None for model in models)
    gc.enable()
    return [alive, after - before]


def caught(ranks: int) -> dict[str, Any]:
    """Rank 1 fails, all ranks catch what they get, and run again in the same process group."""
    rank = dist.get_rank()

    def bad_data(job: Job, start: int) -> Any:
        for t, (x, y) in enumerate(data(job, start), start):
            yield x, y + 100 * (job.seed == 1 and t == 2 and rank == 1)

    rows = [Row(0), Row(1)]
    schedule = random_schedule([1, 1], 4, place=[0, 0, 1, 1], seed=8)
    said, began = "nothing", time.monotonic()
    try:
        array = array_trainer(
            build_model, bad_data, jobs=[row.job for row in rows], stages=CUTS, loss=loss
        )
        runs.run(array, schedule, 9, on_error="raise", **PROCESSES)
    except OptschedError as error:
        said = str(error).splitlines()[-1]
    at_once = time.monotonic() - began < 30
    result = runs.run(trainer(rows), schedule, STEPS, **PROCESSES)
    found = compared(result, rows, [STEPS] * 2) if rank == 0 else []
    return {"said": said, "at_once": at_once, "differences": found}


def killed(ranks: int) -> str:
    """A rank is killed while checkpoints are written after every iteration."""
    rank = dist.get_rank()

    def deadly(job: Job, start: int) -> Any:
        for t, pair in enumerate(tokens(job, start), start):
            if rank == 1 and t == 4 and job.seed == 1:
                os._exit(0)  # nothing is flushed
            yield pair

    array = trainer(CHECKPOINTED, language=True, data=deadly)
    schedule = random_schedule([2, 1], 4, place=[0, 1, 0, 1], seed=4)
    try:
        runs.run(
            array,
            schedule,
            7,
            checkpoint=f"{sys.argv[1]}/checkpoints",
            checkpoint_every=1,
            **PROCESSES,
        )
    except PeerLost as error:
        return str(error)
    return "nobody noticed"


def resumed(ranks: int) -> dict[str, Any]:
    """Goes on from what `killed` has left, with another order, on any number of ranks."""
    array = trainer(CHECKPOINTED, language=True)  # its tied weight is elsewhere, too
    place = [1, 0, 0, 1] if ranks == 2 else [2, 0, 3, 1]
    schedule = random_schedule([2, 1], 4, place=place, seed=9)
    result = runs.run(
        array, schedule, 7, checkpoint=f"{sys.argv[1]}/checkpoints", resume=True, **PROCESSES
    )
    found: dict[str, Any] = {"steps": [len(losses) for losses in result.losses], "differences": []}
    for row, trained in zip(CHECKPOINTED, result.trained, strict=False):
        wanted = alone(row, 7, tied=True)
        rest = dataclasses.replace(wanted, losses=wanted.losses[7 - len(trained.losses) :])
        found["differences"] += differences(trained, rest)
    return found


def sleeps(ranks: int) -> list[str]:
    """The errors of all ranks when rank 1 sleeps for longer than the timeout."""
    noticed = Path(sys.argv[1]) / "noticed"

    def sleepy(job: Job, start: int) -> Any:
        for t, pair in enumerate(data(job, start), start):
            while dist.get_rank() == 1 and t == 2 and not noticed.exists():
                time.sleep(0.01)
            yield pair

    array = array_trainer(build_model, sleepy, jobs=[Row(0).job], stages=CUTS, loss=loss)
    schedule = random_schedule([1], 4, place=[0, 1, 0, 1])

    def train() -> None:
        try:
            runs.run(array, schedule, 5, backend="process", timeout=1.0)
        finally:
            noticed.touch()

    return sentences(ranks, train)


def with_losses(ranks: int) -> list[str]:
    """Differences with a loss that is trained, and with a split backward."""
    found = []
    jobs = [
        Job(0, 9, MAKERS["adamw"], microbatches=4, model={"norm": False}),
        Job(1, 8, MAKERS["sgd"], microbatches=2, recompute=True, precision="amp-bf16",
            model={"norm": False}),
    ]  # fmt: skip
    times = JobArray([[2] * 2] * 2, [[2] * 2] * 2, weight=[[1] * 2] * 2, micro_batches=[4, 2])
    whole = random_schedule([4, 2], 2, update=[0, 1], together=[0, 1], seed=3)
    clipped = [dataclasses.replace(job, clip_norm=0.5) for job in jobs]
    for row, schedule in ((jobs, pipelines.zb_h1(times)), (clipped, whole)):
        batches = loss_tests.trainer(loss_tests.Row(loss, True), (8, 2)).data
        array = runs.array_trainer(
            loss_tests.build, batches, jobs=row, stages=[3], loss=loss_tests.Centered()
        )
        result = runs.run(array, schedule, STEPS, on_error="raise", **PROCESSES)
        if dist.get_rank() == 0:
            for j, got in enumerate(result.trained):
                found += differences(got, array.train_alone(j, STEPS))
    return found


def several(ranks: int, cases: dict[str, list[Any]]) -> dict[str, Any]:
    """Answers of several cases, one after the other in the same process group."""
    return {name: globals()[case](ranks, *given) for name, (case, *given) in cases.items()}


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Another attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> None:
    """Run all groups; ends with 1 if a rank did."""
    folder, groups = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "transformers_models" in sys.argv[2]:
        import hf_models

        hf_models.build("llama tied")  # modules are loaded once, not in every rank
    torch.set_num_threads(1)
    gc.freeze()
    for number, (ranks, name, *arguments) in enumerate(groups):
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                serve(rank, ranks, folder / str(number), name, arguments)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            os._exit(1)


def serve(rank: int, ranks: int, place: Path, name: str, arguments: list[Any]) -> None:
    """One rank: join the group, run the case, write its answer."""
    code = 1
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}.store", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        answer = globals()[name](ranks, *arguments)
        if rank == 0:
            place.with_suffix(".json").write_text(json.dumps(answer))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
