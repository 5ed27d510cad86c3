"""A training job of a simulated cluster, and the ranges of its fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from optsched.cluster.workload.speedup import MOST_GPUS, Linear, Speedup
from optsched.errors import InputError
from optsched.io.values import format_value, integer, label, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster.workload.curve import Curve

PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Time units in a second."""

WORK: Final = 10**6
"""Units of work in one unit of time on one GPU; also the rate of one GPU."""

MOST_WORK: Final = 2**62
"""Work of a job: one more unit of time at any speed still fits 64 bits."""

MOST_RATE: Final = 2**53
"""Work per unit of time: the speed of 9 * 10**9 GPUs."""

MOST_AMOUNT: Final = 2.0**20
"""CPUs or GB of memory."""

MOST_SPEED: Final = 1000.0
"""Speed on a type of GPU, relative to types of speed 1."""

CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that names and free texts of jobs exclude: a line of a trace cannot hold them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a job: arrival, allowed sizes, amount of work; `Workload.of` checks the fields.

    Parameters
    ----------
    name
        Distinct, not empty; names and labels have no control characters.
    submit
        Arrival, in the workload's unit of time.
    sizes
        Allowed numbers of GPUs, ascending; one for a rigid job (a gang), ``(0,)`` for a zero-slot
        task.
    work
        1-GPU time times `WORK` until completion. For a job with a curve that has a target it is
        the work of `passes` passes, and the job ends at the first report at or below the target.
    speedup
        Speed by number of GPUs.
    passes
        Data passes that `work` is made of.
    curve
        Uncertainty after every pass; None: the job reports none.
    priority, weight, group
        1 (first) to 99; share, > 0; user, queue or experiment.
    preemptible, restart_cost
        Cost None: that of the simulation.
    template
        Model and data; jobs of one template take similar numbers of passes.
    estimate
        Estimated total work, what policies see that are not clairvoyant; None: the true work.
    speeds
        Speed by type of GPU, a factor on that of `speedup`; 1 on types that are not named, 0 on
        types that the job cannot use.
    cpus_per_gpu, memory_per_gpu_gb
        Needed beside every GPU on the same node, in thousandths at the finest.

    Examples
    --------
    >>> from optsched.cluster import WORK, Amdahl, Job
    >>> job = Job(name="a", sizes=(1, 2, 4), work=3600 * WORK, speedup=Amdahl(0.1), passes=10)
    >>> job.sizes
    (1, 2, 4)
    """

    name: str
    submit: int = 0
    sizes: tuple[int, ...]
    work: int
    speedup: Speedup = field(default_factory=Linear)
    passes: int = 1
    curve: Curve | None = None
    priority: int = 50
    weight: float = 1.0
    group: str = ""
    preemptible: bool = True
    restart_cost: int | None = None
    template: str = ""
    estimate: int | None = None
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    cpus_per_gpu: float = 0.0
    memory_per_gpu_gb: float = 0.0


def ascending(place: str, sizes: Any) -> tuple[int, ...]:
    """Allowed numbers of GPUs: not empty, distinct, ascending; 0 only alone."""
    rule = "expected ascending numbers of GPUs such as (1, 2, 4), or (0,) for none"
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise InputError(f"{place}: {rule}, got {format_value(sizes)}")
    found = tuple(integer(place, size, 0, MOST_GPUS) for size in sizes)
    zero = found[:1] == (0,) and len(found) > 1
    if not found or zero or any(b <= a for a, b in pairwise(found)):
        raise InputError(f"{place}: {rule}, got {format_value(list(found))}")
    return found


def line(place: str, value: Any, *, empty: bool = True) -> str:
    """A name without control characters; maybe not an empty one."""
    text = label(place, value)
    if not text and not empty:
        raise InputError(f"{place}: empty; give every job a name")
    if CONTROL.search(text):
        raise InputError(f"{place}: control characters (a line break, NUL) in {format_value(text)}")
    return text


@lru_cache(maxsize=4096)
def rates(speedup: Speedup, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Work per unit of time at every size: round(`WORK` * f(g)), `WORK` for a zero-slot task."""
    if not isinstance(speedup, Speedup) or isinstance(speedup, type):
        what = f"expected Linear(), Amdahl(c) or Table(...), got {format_value(speedup)}"
        raise InputError(f"speedup: {what}")
    found = []
    for size in sizes:
        speed = number(f"speedup at {size} GPUs", speedup.of(size) if size else 1.0)
        rate = round(min(speed * WORK, float(MOST_RATE)))
        if not 1 <= rate < MOST_RATE:
            raise InputError(f"speedup: {speed:g} on {size} GPUs is outside 10^-6..9 * 10^9")
        found.append(rate)
    return tuple(found)
