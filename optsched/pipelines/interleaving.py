"""Interleaved 1F1B: several chunks of the model on every device, wrapped around."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.pipelines.fixed_order import Step, fixed, repeated
from optsched.pipelines.places import chunks_of

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def interleaved(job: JobArray) -> Schedule:
    """Interleaved 1F1B in Megatron's order (Narayanan et al. 2021, section 2.2).

    Device s of S runs 2(S - s - 1) + (c - 1)S forward blocks of its c chunks, then one forward,
    one backward. Micro-batches go through the chunks in groups of S. If S does not divide m, the
    groups are those of torch's `ScheduleInterleaved1F1B`: max(1, m // S) groups of equal size.

    Parameters
    ----------
    job
        With ``place=pipelines.wrapped(devices, chunks)``.

    Raises
    ------
    InputError
        Another place, or the micro-batches do not fall into groups of equal size.
    """
    devices, chunks = chunks_of(job, "interleaved")
    rows = repeated(job, lambda units: _steps(devices, chunks, len(units)))
    return fixed(job, "interleaved", rows)


def _steps(devices: int, chunks: int, n: int) -> list[list[Step]]:
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
