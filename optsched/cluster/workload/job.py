"""One training job of a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from optsched.cluster.workload.curve import Curve
from optsched.cluster.workload.job_checks import (
    AMOUNTS,
    FACTORS,
    MOST_AMOUNT,
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    WHOLE,
    ascending,
    line,
)  # fmt: skip
from optsched.cluster.workload.speedup import Linear, Speedup
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Time units in a second."""

WORK: Final = 10**6
"""Units of work in one unit of time on one GPU; also the rate of one GPU."""

_LINEAR: Final = Linear()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: when it comes, what it may use, and how much it has to do.

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
        the work of `passes` passes, and the job ends when the curve reaches the target.
    speedup
        Speed by GPUs.
    passes
        Data passes that `work` is made of.
    curve
        Uncertainty after every pass; None: the job reports none.
    priority
        1 (first) to 99; weight > 0: share; group: whose job it is.
    restart_cost
        None: that of the simulation.
    template
        Model and data; jobs of one template take similar numbers of passes.
    estimate
        Estimated total work, what policies see that are not clairvoyant; None: the true work.
    speeds
        Speed by type of GPU, a factor on that of `speedup`; 1 on types that are not named, and 0
        on those that the job cannot use.
    cpus_per_gpu, memory_per_gpu_gb
        What it asks for beside every GPU on the same node, in thousandths at the finest.

    Raises
    ------
    InputError
        A field of a wrong type, or a number that cannot be; the message names the job and the
        field. `Workload.of` looks at speeds, and at times and work that could overflow.
    """

    name: str
    submit: int = 0
    sizes: tuple[int, ...]
    work: int
    speedup: Speedup = _LINEAR
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

    def __post_init__(self) -> None:
        place = f"job {format_value(line('job.name', self.name, empty=False))}: "
        own = self.__dict__
        for key, (least, most) in WHOLE.items():
            if key != "restart_cost" or self.restart_cost is not None:
                own[key] = integer(f"{place}{key}", own[key], max(least, 0), most)
        if self.estimate is not None:
            own["estimate"] = integer(f"{place}estimate (work)", self.estimate, 1, MOST_WORK)
        for key in FACTORS:
            own[key] = number(f"{place}{key}", own[key], above=True)
        for key in AMOUNTS:
            own[key] = number(f"{place}{key}", own[key], 0.0, MOST_AMOUNT)
        if not isinstance(self.speeds, Mapping):
            raise InputError(
                f'{place}speeds: expected speeds by type such as {{"A100": 2.0}}, got '
                f"{format_value(self.speeds)}"
            )
        own["speeds"] = {
            line(f"{place}speeds", kind, empty=False):
            number(f"{place}speeds[{format_value(kind)}]", speed, 0.0, MOST_SPEED)
            for kind, speed in self.speeds.items()
        }  # fmt: skip
        own["sizes"] = ascending(f"{place}sizes", self.sizes)
        line(f"{place}group", self.group)
        line(f"{place}template", self.template)
        if not isinstance(self.preemptible, bool):
            raise InputError(
                f"{place}preemptible: expected True or False, got {format_value(self.preemptible)}"
            )
        if not isinstance(self.speedup, Speedup) or isinstance(self.speedup, type):
            raise InputError(
                f"{place}speedup: expected Linear(), Amdahl(c), Table(...) or Goodput(...), "
                f"got {format_value(self.speedup)}"
            )
        if self.curve is not None and not isinstance(self.curve, Curve):
            raise InputError(f"{place}curve: expected a Curve, got {format_value(self.curve)}")
        if self.passes > self.work:
            raise InputError(f"{place}passes: {self.passes} passes of less than one unit of work")

    @property
    def is_rigid(self) -> bool:
        """Whether it has one size only."""
        return len(self.sizes) == 1


def rates(speedup: Speedup, sizes: tuple[int, ...], place: str = "") -> tuple[int, ...]:
    """Work per unit of time at every size: round(`WORK` * f(g)), `WORK` for a zero-slot task."""
    try:
        return _rates(speedup, sizes)
    except InputError as error:
        raise InputError(f"{place}{error.args[0]}") from None


@lru_cache(maxsize=4096)
def _rates(speedup: Speedup, sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in sizes:
        speed = number(f"speedup at {size} GPUs", speedup.of(size) if size else 1.0)
        rate = round(min(speed * WORK, float(MOST_RATE)))
        if not 1 <= rate < MOST_RATE:
            raise InputError(f"speedup: {speed:g} on {size} GPUs is outside 10^-6..9 * 10^9")
        found.append(rate)
    return tuple(found)
