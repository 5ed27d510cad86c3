"""What many ranks have comes together on the first: states, losses, times on its clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from optsched.arraypipe.distributed.transport import hearing
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.plan.segments import Walk
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.runtime.inline import Past

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.distributed.transport import GlooLinks
    from optsched.arraypipe.plan.segments import Course
    from optsched.arraypipe.plan.types import Record
    from optsched.arraypipe.runtime.inline import Moment
    from optsched.arraypipe.runtime.state import JobRun, JobStage


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
        if links.rank == 0:
            found.append(min((_ask(rank, links) for _ in range(_ROUNDS)), key=lambda r: r.error))
        elif links.rank == rank:
            for _ in range(_ROUNDS):
                _answer(links)
    return found if links.rank == 0 else []


def on_first_clock(records: Sequence[Record], before: Reading, after: Reading) -> list[Record]:
    """Records of a rank in the time of rank 0."""
    moved = to_first(before, after)
    return [r._replace(start=moved(r.start), end=moved(r.end)) for r in records]


def to_first(before: Reading, after: Reading) -> Callable[[int], int]:
    """From the time of a rank to that of rank 0; the offset drifts evenly between two readings.

    An offset within its error is none: processes of one machine share a clock.
    """
    if max(abs(r.offset) - r.error for r in (before, after)) <= 0:
        return int
    span = max(1, after.at - before.at)

    def moved(t: int) -> int:
        return t + before.offset + (after.offset - before.offset) * (t - before.at) // span

    return moved


def _ask(rank: int, links: GlooLinks) -> Reading:
    asked = time.perf_counter_ns()
    _send(0, rank, links)
    there = _receive(rank, links)
    back = time.perf_counter_ns()
    return Reading(there, (asked + back) // 2 - there, (back - asked + 1) // 2)


def _answer(links: GlooLinks) -> None:
    _receive(0, links)
    _send(time.perf_counter_ns(), 0, links)


def _send(value: int, rank: int, links: GlooLinks) -> None:
    links.tell(rank, torch.tensor([value]).view(torch.uint8))


def _receive(rank: int, links: GlooLinks) -> int:
    return int(links.hear(rank, 8).view(torch.int64).item())


CopyRow = tuple[int, str, int, int, int, int, int]
"""As in `Copied`; plain, because there are many."""


def copies_on(clock: Callable[[int], int], rows: Sequence[CopyRow]) -> list[Copied]:
    """Copies of one rank on another clock."""
    return [Copied(*row[:4], clock(row[4]), clock(row[5]), row[6]) for row in rows]


def drop(stage: JobStage) -> None:
    """Give the memory of a stage back that another rank trains; its objects stay."""
    masters = stage.masters or []
    borrowed = [entry.parameter for entry in stage.borrowed]
    for parameter in [p for _, p in (*stage.parameters, *masters)] + borrowed:
        parameter.data = parameter.data.new_empty(0)
    stage.set_buffers([buffer.new_empty(0) for buffer in stage.buffers()])
    if stage.optimizer is not None:
        stage.optimizer.state.clear()


def gather(runs: Sequence[JobRun], homes: Mapping[int, tuple[int, ...]], links: GlooLinks) -> None:
    """Bring all stages of all jobs to rank 0 (collective).

    Parameters
    ----------
    homes
        Device of every stage, by job.
    """
    for rank in range(1, links.size):
        if links.rank not in (0, rank):
            continue
        for job, home in sorted(homes.items()):
            for stage in [s for s, device in enumerate(home) if device == rank]:
                part = runs[job].stages[stage]
                if links.rank:
                    _give([_state(part)], links)
                else:
                    _install(part, _take(rank, links))
        if links.rank:
            _give([_lives(runs, homes)], links)
        else:
            _hear_of(runs, _take(rank, links))


def gather_past(past: Past, links: GlooLinks) -> list[Past] | None:
    """What all ranks remember on rank 0, None elsewhere (collective)."""
    if links.rank:
        _give([(past.rows, past.cut, past.left_out)], links)
        return None
    found = [past]
    for rank in range(1, links.size):
        other = Past()
        other.rows, other.cut, other.left_out = _take(rank, links)
        found.append(other)
    return found


def gather_copies(own: Sequence[Copied], links: GlooLinks) -> list[Sequence[CopyRow]] | None:
    """The copies of all ranks on rank 0; None elsewhere (collective)."""
    if links.rank:
        _give([[*map(tuple, own)]], links)
        return None
    return [own, *(_take(rank, links) for rank in range(1, links.size))]


def gather_exposed(
    records: Sequence[Record], exposed: Sequence[int], links: GlooLinks
) -> dict[tuple[int, int, int], int] | None:
    """Waits for copies on rank 0, by (segment, operation, cycle); None elsewhere (collective)."""
    keys = [(r.segment, r.operation, r.cycle) for r in records] if exposed else []
    mine = list(zip(keys, exposed, strict=True))
    if links.rank:
        _give([mine], links)
        return None
    found = dict(mine)
    for rank in range(1, links.size):
        found.update(_take(rank, links))
    return found


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
    found = {
        "parameters": [p.detach() for _, p in stage.parameters],
        "masters": [p.detach() for _, p in stage.masters or ()],
        "buffers": list(stage.buffers()),
        "optimizer": _moments(stage.optimizer),
        "groups": _settings(stage.optimizer),
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
        for parameter, moments in zip(_trained(stage.optimizer), state["optimizer"], strict=True):
            if moments is not None:
                stage.optimizer.state[parameter] = moments
        for group, values in zip(stage.optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(state["scheduler"])


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _moments(optimizer: Optimizer | None) -> list[Any]:
    return [] if optimizer is None else [optimizer.state.get(p) for p in _trained(optimizer)]


def _settings(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [{k: v for k, v in group.items() if not k.startswith("param")} for group in groups]


def _lives(runs: Sequence[JobRun], homes: Mapping[int, tuple[int, ...]]) -> list[Any]:
    """What this rank knows of the jobs on it."""
    rows = []
    for job in homes:
        run = runs[job]
        error = run.job.life.error
        args = None if error is None else (error.stage, error.iteration, str(error))
        rows.append((job, run.job.life.status, run.end, args, list(run.losses)))
    return rows


def _hear_of(runs: Sequence[JobRun], rows: list[Any]) -> None:
    for job, status, end, failure, losses in rows:
        run = runs[job]
        if losses:
            run.losses[:] = losses
        if status in ("failed", "stopped") and run.job.life.status != "failed":
            run.job.life.status = status
            run.end = min(run.end, end)
        if failure is not None and run.job.life.error is None:
            stage, iteration, sentence = failure
            error = JobFailed(run.title, job, stage, iteration, "")
            error.args = (sentence,)
            run.job.life.error = error


def _give(objects: list[Any], links: GlooLinks) -> None:
    with hearing():
        dist.send_object_list(objects, dst=0, group=links.group)


def _take(rank: int, links: GlooLinks) -> Any:
    row: list[Any] = [None]
    with hearing():
        dist.recv_object_list(row, src=rank, group=links.group)
    return row[0]
