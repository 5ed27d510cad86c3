"""What a block costs beside its computation: the real worker and channels on tiny stages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise
from statistics import median
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from optsched.arraypipe.distributed.mailbox import Capacity, Post
from optsched.arraypipe.distributed.transport import GlooLinks
from optsched.arraypipe.job import Job
from optsched.arraypipe.model.split import stage_names
from optsched.arraypipe.plan.messages import routes
from optsched.arraypipe.plan.plan import compile
from optsched.arraypipe.plan.segments import Segment, Walk
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages
from optsched.arraypipe.runtime.state import JobRun
from optsched.arraypipe.runtime.worker import Resident, Worker
from optsched.pipelines import one_f_one_b
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CYCLES: Final = 48  # of which the first quarter warms up
_MOST_STAGES: Final = 4


class _Loopback(GlooLinks):
    """Links of one rank to others that are in the same process."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.timeout, self.rank, self.size = timedelta(seconds=60), rank, size
        self.group = dist.ProcessGroupGloo(store, rank, size, self.timeout)


def block_overhead(n_stages: int) -> int:
    """CPU nanoseconds of the process backend for one block, its messages included.

    One job is trained by real workers, one a stage, that send over gloo to each other in this
    process, and then without any of it; the stages are so small that nearly all is overhead. CPU
    time, because a device that has enough to do never waits for a message.
    """
    n = min(n_stages, _MOST_STAGES)
    plan = compile(one_f_one_b(JobArray([[1] * n], [[2] * n])))
    segment = Segment(plan, routes(plan), (0,), [0], [_CYCLES])
    run, bare = _job(n), _job(n)
    quiet: Any = lambda *_: None  # noqa: E731
    worker = Worker([run], Resident([run]), nn.functional.mse_loss, quiet, quiet)
    capacity = Capacity()
    capacity.measure(run, worker)
    Capacity().measure(bare, worker)
    links = _links(n)
    try:
        own = _executed(segment, worker, [Post(one, capacity.of, lambda _: None) for one in links])
        alone = _bare(bare)
    finally:
        for one in links:
            one.group = None
    return max(0, round((own - alone) / len(plan.blocks)))


def _links(n: int) -> list[_Loopback]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(n) as pool:  # each waits for the others
        return [*pool.map(partial(_Loopback, store, size=n), range(n))]


def _data(job: Job, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.zeros(1, 1), torch.zeros(1, 1)


def _build(n: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(n)))


def _job(n: int) -> JobRun:
    job = Job(0, 1, partial(torch.optim.SGD, lr=0.1))
    model = fresh_model(partial(_build, n), job)
    names = stage_names(model, [*range(1, n)], None)
    stages = fresh_stages(model, names, job, 0, "job", [torch.device("cpu")] * n)
    return JobRun(job, 0, "job", model, stages, 0, _CYCLES, Feed(_data, job, "job", 0))


def _executed(segment: Segment, worker: Worker, posts: Sequence[Post]) -> float:
    """Median of a cycle as ranks run it, one after the other."""
    rows, channel_of = segment.routes, segment.routes.channel_of
    mail: dict[int, Any] = {}
    times = [thread_time_ns()]
    for post in posts:
        post.open(segment, 0, 2)
    for now in Walk(segment):
        post = posts[segment.plan.blocks[now.operation].device]
        post.post(now.cycle)
        received = {
            k: mail.pop(k) if channel_of[k] < 0 else post.receive(k, now.iteration)
            for k in rows.inputs[now.operation]
        }
        sent = worker.execute(segment, now, received)
        away = {k: sent.pop(k) for k in rows.outputs[now.operation] if channel_of[k] >= 0}
        mail.update(sent)
        post.ended(now, away)
        times.append(thread_time_ns())
    for post in posts:
        post.flush()
        post.close()
    return _of_a_cycle(times[:: len(segment.plan.blocks)])


def _bare(run: JobRun) -> float:
    """The same computation by itself."""
    times = [thread_time_ns()]
    for iteration in range(_CYCLES):
        assert run.feed is not None
        run.feed.draw(iteration)
        x: Any = (run.feed.input(0, torch.device("cpu")),)
        end = blocks.Criterion(
            nn.functional.mse_loss, run.feed.target(0, run.stages[0].device), run.feed.shares[0]
        )
        for stage in run.stages:
            key = run.job.key(iteration, 0, stage.index)
            x = blocks.forward(stage, 0, x, key, end if stage.last else None, False)
        gradients: Any = None
        for stage in reversed(run.stages):
            gradients = blocks.backward(stage, 0, gradients)
            blocks.update(stage, None, None, 0.0)
        times.append(thread_time_ns())
    return _of_a_cycle(times)


def _of_a_cycle(times: Sequence[int]) -> float:
    spans = [later - one for one, later in pairwise(times)]
    return median(spans[len(spans) // 4 :])
