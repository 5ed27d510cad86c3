"""A job of equal stages, laid out as a named pipeline wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer
from optsched.pipelines.formulas import CHUNKED, NAMES, SPLIT
from optsched.pipelines.places import wrapped, zigzag
from optsched.problems.jobarray.checks import MAX_BLOCKS
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """One job of equal stages for the pipeline `name`, with the arguments of `bubble`.

    Every pipeline gets the same work per device: chunks take ``1 / chunks`` of the times, and a
    pipeline that does not split the backward pass runs ``backward + weight`` as one block. A chunk
    keeps one byte from F to the end of its backward pass (W if there is one), so that peak bytes
    count chunks of activations.

    Raises
    ------
    InputError
        A time is no multiple of the chunks, or `weight` is missing for ``zb_h1`` or ``zb_h2``.
    """
    c, place = layout(name, stages, chunks)
    if name in SPLIT and weight is None:
        raise InputError(f"weight: missing, {name} splits the backward pass")
    whole = backward if name in SPLIT or weight is None else backward + weight
    times: dict[str, Any] = {"forward": forward, "backward": whole}
    if name in SPLIT:
        times["weight"] = weight
    for key, time in times.items():
        if integer(f"{key}", time, 0, MAX_INTEGER) % c:
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
