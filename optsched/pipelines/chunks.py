"""Orders by hand with several stages a device: where they are, interleaved 1F1B, and Hanayo."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.pipelines.fixed_order import Step, Unit, check_array, ordered
from optsched.problems.jobarray.checks import MAX_BLOCKS, flat

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def wrapped(devices: int, chunks: int = 2) -> tuple[int, ...]:
    """Place stage v on device v mod S, as `interleaved` needs it.

    For `JobArray(place=...)` and `JobArray.from_profile(place=...)`.

    Examples
    --------
    >>> from optsched import pipelines
    >>> pipelines.wrapped(4, 2)
    (0, 1, 2, 3, 0, 1, 2, 3)
    """
    _check(devices, chunks)
    return (*range(devices),) * chunks


def zigzag(devices: int, chunks: int = 2) -> tuple[int, ...]:
    """Place stages down the devices and up again, as `hanayo` needs it.

    Such as ``(0, 1, 2, 2, 1, 0)``; `chunks` is even, two a wave.

    Examples
    --------
    >>> from optsched import pipelines
    >>> pipelines.zigzag(4, 2)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    _check(devices, chunks)
    if chunks % 2:
        raise InputError(f"chunks: a wave has two, expected an even number, got {chunks}")
    return (*range(devices), *reversed(range(devices))) * (chunks // 2)


def chunks_of(job: JobArray, name: str) -> tuple[int, int]:
    """Devices and stages a device of a job that is placed as `wrapped` or `zigzag` say."""
    check_array(job, name)
    layout = {"interleaved": wrapped, "hanayo": zigzag}[name]
    devices = 1 + max(flat(job.place))
    chunks = job.n_stages // devices
    fits = chunks * devices == job.n_stages and (layout is wrapped or chunks % 2 == 0)
    if not fits or job.place != layout(devices, chunks):
        raise InputError(
            f"{name}: needs several stages a device, give "
            f"place={layout.__name__}(devices, chunks) of optsched.pipelines"
        )
    return devices, chunks


def _check(devices: int, chunks: int) -> None:
    integer("devices", devices, 1, MAX_BLOCKS)
    integer("chunks", chunks, 1, MAX_BLOCKS // devices)


def interleaved(job: JobArray) -> Schedule:
    """Run interleaved 1F1B in Megatron's order (Narayanan et al. 2021, section 2.2).

    Device s of S runs 2(S - s - 1) + (c - 1)S forward blocks of its c chunks, then one forward,
    one backward. Micro-batches go through the chunks in groups of S. If S does not divide m, the
    groups are those of torch's `ScheduleInterleaved1F1B`: max(1, m // S) groups of equal size.
    The job has ``place=pipelines.wrapped(devices, chunks)``; micro-batches that do not fall into
    groups of equal size are refused.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = pipelines.uniform("interleaved", stages=4, micro_batches=8)
    >>> pipelines.interleaved(job).makespan  # 1F1B takes 66
    57
    """
    devices, chunks = chunks_of(job, "interleaved")
    return ordered(
        job, "interleaved", lambda units: _interleaved_steps(devices, chunks, len(units))
    )


def _interleaved_steps(devices: int, chunks: int, n: int) -> list[list[Step]]:
    groups = max(1, n // devices)
    if n % groups:
        raise InputError(
            f"micro_batches: {n} do not fall into {groups} groups of equal size for "
            f"{devices} devices; take a multiple of {devices}"
        )
    size, total = n // groups, n * chunks

    def forward(step: int, device: int) -> Step:
        chunk = step // size % chunks
        return Step("F", _unit(step, size, chunks), chunk * devices + device)

    def backward(step: int, device: int) -> Step:
        chunk = chunks - 1 - step // size % chunks
        return Step("B", _unit(step, size, chunks), chunk * devices + device)

    rows = []
    for device in range(devices):
        ahead = min(total, 2 * (devices - device - 1) + (chunks - 1) * size)
        row = [forward(k, device) for k in range(ahead)]
        for k in range(total):
            if ahead + k < total:
                row.append(forward(ahead + k, device))
            row.append(backward(k, device))
        rows.append(row)
    return rows


def _unit(step: int, size: int, chunks: int) -> int:
    """Micro-batch of a step: a group of `size` goes through all chunks before the next begins."""
    return step // (size * chunks) * size + step % size


def hanayo(job: JobArray) -> Schedule:
    """Run waves: stages go down the devices and up again, w times (Liu et al. 2023).

    The paper gives the placement; the order here is greedy in the job's own times and lags: a free
    device takes backward before forward, then the earlier micro-batch, then the deeper stage. For
    equal stages, b = 2f and m = S its bubble is at most the paper's (2S-2)/(3wS+S-1) for up to 3
    waves (checked for S <= 16). With 4 it is up to 0.4 points above it, first at S = 4.
    The job has ``place=pipelines.zigzag(devices, 2 * waves)``.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = pipelines.uniform("hanayo", stages=4, micro_batches=4)
    >>> pipelines.hanayo(job).makespan
    36
    """
    devices, _ = chunks_of(job, "hanayo")
    return ordered(job, "hanayo", lambda units: _greedy(job, devices, units))


def _greedy(job: JobArray, devices: int, units: list[Unit]) -> list[list[Step]]:
    last, place = job.n_stages - 1, job.devices_of(0).tolist()
    again = list(job.recomputes)
    # the whole backward pass; updates and switches are left out
    backward = job.backward + (0 if job.weight is None else job.weight)
    backward[again] += job.recompute[again]
    times = {"F": job.forward.tolist(), "B": backward.tolist()}
    lags = {"F": job.lag_forward.tolist(), "B": job.lag_backward.tolist()}
    rows: list[list[Step]] = [[] for _ in range(devices)]
    ready: list[list[tuple[bool, int, int, Step]]] = [[] for _ in range(devices)]
    # (time, what): a step that may run from then on, or None for a device that becomes free
    events: list[tuple[int, int, Step | None]] = []
    free = [0] * devices
    count = len(units)  # breaks ties between events
    for k in range(count):
        events.append((0, k, Step("F", k, 0)))
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            step = heapq.heappop(events)[2]
            if step is not None:
                key = (step.kind == "F", step.unit, -step.stage, step)
                heapq.heappush(ready[place[step.stage]], key)
        for d in range(devices):
            if not ready[d] or free[d] > now:
                continue
            step = heapq.heappop(ready[d])[-1]
            rows[d].append(step)
            j, v = units[step.unit].job, step.stage
            free[d] = now + times[step.kind][j][v]
            after, lag = _follower(step, last), 0
            if after is not None and after.stage != v:
                lag = lags[step.kind][j][min(v, after.stage)]
            for time, event in ((free[d] + lag, after), (free[d], None)):
                heapq.heappush(events, (time, count, event))
                count += 1
    return rows


def _follower(step: Step, last: int) -> Step | None:
    """What a step makes possible."""
    kind, k, v = step
    if kind == "F":
        return Step("B", k, v) if v == last else Step("F", k, v + 1)
    return Step("B", k, v - 1) if v else None
