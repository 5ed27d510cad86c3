"""Equal stages: a job for each named pipeline, its idle share, and the published formulas."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer
from optsched.pipelines.chunks import wrapped, zigzag
from optsched.problems.jobarray.checks import MAX_BLOCKS
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule

NAMES: Final = (
    "vanilla", "gpipe", "one_f_one_b", "interleaved", "chimera", "hanayo",
    "zb_h1", "zb_h2",
)  # fmt: skip
"""The hand-made pipelines, in the order of tables."""

CHUNKED: Final = ("interleaved", "hanayo")
"""Those with several chunks of the model on a device."""

SPLIT: Final = ("zb_h1", "zb_h2")
"""Those that need weight gradients as blocks of their own."""


def idle_share(schedule: Schedule) -> Fraction:
    """Compute the idle share of the makespan or period, over all devices with blocks.

    Examples
    --------
    >>> from optsched import pipelines
    >>> schedule = pipelines.gpipe(optsched.JobArray([[1] * 4], [[2] * 4], micro_batches=8))
    >>> str(pipelines.idle_share(schedule))
    '3/11'
    """
    span = schedule.makespan if schedule.period is None else schedule.period
    used = [r for r in range(schedule.n_resources) if len(schedule.users[r])]
    busy = sum(int(schedule.duration[schedule.users[r]].sum()) for r in used)
    return 1 - Fraction(busy, len(used) * span) if used and span else Fraction(0)


def bubble(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    forward: int = 1,
    backward: int = 1,
    weight: int | None = None,
    chunks: int = 2,
) -> Fraction:
    """Compute the published bubble of a pipeline of equal stages without communication, exactly.

    It is the idle share of the makespan; for ``zb_h2``, as in the paper, that of the *period* of
    iterations that follow each other.

    Parameters
    ----------
    name
        One of `NAMES`; refused are ``hanayo``, for which only a bound is published, and numbers
        for which the formula does not hold.
    forward, backward, weight
        Times of a device for all its chunks and one micro-batch. With `weight`, the backward pass
        takes ``backward + weight``; only ``zb_h1`` and ``zb_h2`` run them apart.
    chunks
        Parts of the model on a device; for ``interleaved`` only.

    Examples
    --------
    >>> from optsched import pipelines
    >>> str(pipelines.bubble("one_f_one_b", stages=4, micro_batches=8))
    '3/11'
    """
    if name not in NAMES:
        raise InputError(f"name: expected one of {', '.join(NAMES)}, got {format_value(name)}")
    s = integer("stages", stages, 1, MAX_INTEGER)
    m = integer("micro_batches", micro_batches, 1, MAX_INTEGER)
    f = integer("forward", forward, 1, MAX_INTEGER)
    b = integer("backward", backward, 1, MAX_INTEGER)
    w = None if weight is None else integer("weight", weight, 0, MAX_INTEGER)
    c = integer("chunks", chunks, 1, MAX_INTEGER)
    if name == "vanilla":
        return Fraction(s - 1, s)
    if name in SPLIT:
        return _zero_bubble(name, s, m, f, b, w)
    if name == "interleaved":
        _holds(name, m % s == 0, f"S = {s} divides m", f"m = {m}")
        return Fraction(s - 1, c * m + s - 1)
    if name == "chimera":
        return _chimera(s, m, f, b + (w or 0))
    if name == "hanayo":
        raise InputError(
            "hanayo: only a bound is published, (2S - 2) / (3wS + S - 1) for m = S, b = 2f and "
            "w waves; the order here keeps it for w <= 3"
        )
    return Fraction(s - 1, m + s - 1)  # GPipe and 1F1B


def _zero_bubble(name: str, s: int, m: int, f: int, b: int, w: int | None) -> Fraction:
    """Qi et al. 2024, table 1: (S-1)(f+b-w) and (S-1)(f+b-2w) idle."""
    if w is None:
        raise InputError(f"weight: missing, {name} splits the backward pass")
    least, times = (s, 1) if name == "zb_h1" else (2 * s - 1, 2)
    _holds(name, m >= least, f"m >= {least}", f"m = {m}")
    _holds(name, w <= min(f, b), "w <= f and w <= b", f"f = {f}, b = {b}, w = {w}")
    idle = (s - 1) * (f + b - times * w)
    return Fraction(idle, m * (f + b + w) + idle)


def _chimera(s: int, m: int, f: int, b: int) -> Fraction:
    """Li & Hoefler 2021, section 3: for equal blocks, and for b = 2f in a single unit."""
    _holds("chimera", s % 2 == 0, "S even", f"S = {s}")
    if b == f:
        _holds("chimera", m % s == 0, f"S = {s} divides m", f"m = {m}")
        return Fraction(s - 2, 2 * m + s - 2)
    _holds("chimera", b == 2 * f, "b = f or b = 2f", f"f = {f}, b = {b}")
    _holds("chimera", m == s, f"m = S = {s} if b = 2f", f"m = {m}")
    return Fraction(2 * (s - 2), 3 * m + 2 * (s - 2))


def _holds(name: str, condition: bool, rule: str, got: str) -> None:
    if not condition:
        raise InputError(f"{name}: the published formula holds for {rule}, got {got}")


def uniform(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    forward: int = 2,
    backward: int = 2,
    weight: int | None = 2,
    chunks: int = 2,
) -> JobArray:
    """Make a job of equal stages for the pipeline `name`, with the arguments of `bubble`.

    Every pipeline gets the same work per device: chunks take ``1 / chunks`` of the times, and a
    pipeline that does not split the backward pass runs ``backward + weight`` as one block. A chunk
    keeps one byte from F to the end of its backward pass (W if there is one), so that peak bytes
    count chunks of activations.

    Examples
    --------
    >>> from optsched import pipelines
    >>> pipelines.uniform("interleaved", stages=4, micro_batches=8)
    <JobArray 'interleaved-4x8': 1 jobs, 8 stages on 4 devices>
    """
    c, place = layout(name, stages, chunks)
    if name in SPLIT and weight is None:
        raise InputError(f"weight: missing, {name} splits the backward pass")
    whole = backward if name in SPLIT or weight is None else backward + weight
    times: dict[str, Any] = {"forward": forward, "backward": whole}
    if name in SPLIT:
        times["weight"] = weight
    for key, time in times.items():
        if integer(key, time, 0, MAX_INTEGER) % c:
            raise InputError(f"{key}: expected a multiple of the {c} chunks, got {time}")
        times[key] = [[time // c] * (stages * c)]
    return JobArray(
        **times,
        micro_batches=micro_batches,
        activation=1,
        weight_memory=1 if name in SPLIT else 0,
        place=place,
        name=f"{name}-{stages}x{micro_batches}",
    )


def layout(name: str, stages: int, chunks: int) -> tuple[int, Sequence[int]]:
    """Chunks per device that a pipeline takes of those offered, and the place of its stages."""
    if name not in NAMES:
        raise InputError(f"name: expected one of {', '.join(NAMES)}, got {format_value(name)}")
    integer("stages", stages, 1, MAX_BLOCKS)
    if name not in CHUNKED:
        return 1, wrapped(stages, 1)
    return chunks, (wrapped if name == "interleaved" else zigzag)(stages, chunks)
