"""What many ranks have comes together on the first: states, losses, times on its clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from optsched.arraypipe.distributed.transport import hearing
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.plan.segments import Walk
from optsched.arraypipe.plan.types import Copied, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.distributed.transport import GlooLinks
    from optsched.arraypipe.plan.segments import Course
    from optsched.arraypipe.runtime.inline import Moment, Past
    from optsched.arraypipe.runtime.state import JobRun, JobStage


Timed = TypeVar("Timed", Record, Copied)
Remembered: TypeAlias = "tuple[Past, list[Copied]]"
_ROUNDS = 5


class Reading(NamedTuple):
    """At `at` on a rank's clock that of rank 0 showed ``at + offset``, give or take `error`."""

    at: int
    offset: int
    error: int


def read_clocks(links: GlooLinks) -> list[Reading]:
    """Compare all clocks with that of rank 0; empty on other ranks (collective, nanoseconds).

    The reply that came back soonest bounds the error by half of its time (Cristian 1989).
    """
    found = [Reading(time.perf_counter_ns(), 0, 0)]
    for rank in range(1, links.size):
        if links.rank in (0, rank):
            rows = [_compare(rank, links) for _ in range(_ROUNDS)]
            found.append(min(rows, key=lambda r: r.error))
    return [] if links.rank else found


def _compare(rank: int, links: GlooLinks) -> Reading:
    """Rank 0 asks another one for the time, which answers."""
    word, peer = torch.zeros(1, dtype=torch.int64), 0 if links.rank else rank
    asked = time.perf_counter_ns()
    with hearing():
        if not links.rank:
            dist.send(word, peer, links.group)
        dist.recv(word, peer, links.group)
        back, there = time.perf_counter_ns(), int(word)
        if links.rank:
            word[0] = back
            dist.send(word, peer, links.group)
    return Reading(there, (asked + back) // 2 - there, (back - asked + 1) // 2)


def on_first_clock(rows: Sequence[Timed], before: Reading, after: Reading) -> list[Timed]:
    """Records or copies of a rank in the time of rank 0; the offset drifts evenly between readings.

    An offset within its error is none: processes of one machine share a clock.
    """
    if max(abs(r.offset) - r.error for r in (before, after)) <= 0:
        return list(rows)
    span, drift = max(1, after.at - before.at), after.offset - before.offset

    def moved(t: int) -> int:
        return t + before.offset + drift * (t - before.at) // span

    return [row._replace(start=moved(row.start), end=moved(row.end)) for row in rows]


def drop(stage: JobStage) -> None:
    """Give the memory of a stage back that another rank trains; its objects stay."""
    masters = stage.masters or []
    borrowed = [entry.parameter for entry in stage.borrowed]
    for parameter in [p for _, p in (*stage.parameters, *masters)] + borrowed:
        parameter.data = parameter.data.new_empty(0)
    stage.set_buffers([buffer.new_empty(0) for buffer in stage.buffers()])
    if stage.optimizer is not None:
        stage.optimizer.state.clear()


def gather(
    runs: Sequence[JobRun], homes: Mapping[int, tuple[int, ...]], own: Remembered, links: GlooLinks
) -> list[Remembered]:
    """Bring all stages of all jobs to rank 0, and what each rank remembers (collective).

    `homes` has the devices of all stages by job; the result is empty on the others.
    """
    everybody = [own]
    for rank in range(1, links.size):
        if links.rank not in (0, rank):
            continue
        for job, home in sorted(homes.items()):
            for stage in [s for s, device in enumerate(home) if device == rank]:
                part = runs[job].stages[stage]
                if links.rank:
                    _give(_state(part), links)
                else:
                    _install(part, _take(rank, links))
        if links.rank:
            _give(([_life(runs[job]) for job in homes], own), links)
        else:
            lives, remembered = _take(rank, links)
            everybody.append(remembered)
            for row in lives:
                _hear_of(runs, *row)
    return [] if links.rank else everybody


def in_topological_order(
    course: Course, records: Sequence[Sequence[Record]], cut: Moment = (0, 0)
) -> list[Record]:
    """Records of all devices in an order in which every block comes after all it has waited for.

    Those from a segment and cycle on.
    """
    first, cycle = cut
    at = {(r.segment, r.operation, r.cycle): r for row in records for r in row}
    return [
        at[number, now.operation, now.cycle]
        for number in range(first, len(course.segments))
        for now in Walk(course.segments[number], cycle if number == first else 0)
    ]


def _state(stage: JobStage) -> dict[str, Any]:
    optimizer: Any = stage.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    found = {
        "parameters": [p.detach() for _, p in stage.parameters],
        "masters": [p.detach() for _, p in stage.masters or ()],
        "buffers": list(stage.buffers()),
        "optimizer": [optimizer.state.get(p) for group in groups for p in group["params"]],
        "groups": [{k: v for k, v in g.items() if not k.startswith("param")} for g in groups],
        "scheduler": None if stage.scheduler is None else stage.scheduler.state_dict(),
    }
    return tree_map_only(torch.Tensor, _compact, found)  # type: ignore[no-any-return]


def _compact(t: torch.Tensor) -> torch.Tensor:
    """On the host, and by itself: a view would be sent with all of its storage."""
    t = t.cpu()
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _install(stage: JobStage, state: dict[str, Any]) -> None:
    for key, row in (("parameters", stage.parameters), ("masters", stage.masters or [])):
        for (_, own), value in zip(row, state[key], strict=True):
            own.data = value
    stage.set_buffers(state["buffers"])
    if stage.optimizer is not None:
        groups = stage.optimizer.param_groups
        trained = [p for group in groups for p in group["params"]]
        for parameter, moments in zip(trained, state["optimizer"], strict=True):
            if moments is not None:
                stage.optimizer.state[parameter] = moments
        for group, values in zip(groups, state["groups"], strict=True):
            group.update(values)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(state["scheduler"])


def _life(run: JobRun) -> tuple[Any, ...]:
    """What this rank knows of a job on it."""
    life, error = run.job.life, run.job.life.error
    failure = None if error is None else (error.stage, error.iteration, str(error))
    return run.index, life.status, run.end, failure, list(run.losses)


def _hear_of(
    runs: Sequence[JobRun], job: int, status: Any, end: int, failure: Any, losses: list[float]
) -> None:
    run, life = runs[job], runs[job].job.life
    if losses:
        run.losses[:] = losses
    if status in ("failed", "stopped") and life.status != "failed":
        life.status, run.end = status, min(run.end, end)
    if failure is not None and life.error is None:
        stage, iteration, sentence = failure
        life.error = JobFailed(run.title, job, stage, iteration, "")
        life.error.args = (sentence,)


def _give(value: Any, links: GlooLinks) -> None:
    with hearing():
        dist.send_object_list([value], dst=0, group=links.group)


def _take(rank: int, links: GlooLinks) -> Any:
    row: list[Any] = [None]
    with hearing():
        dist.recv_object_list(row, src=rank, group=links.group)
    return row[0]
