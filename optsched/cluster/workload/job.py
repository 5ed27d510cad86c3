"""One training job of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from optsched.cluster.workload.curve import Curve
from optsched.cluster.workload.job_checks import MOST_RATE, MOST_WORK, ascending, line
from optsched.cluster.workload.speedup import Linear, Speedup
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer, number, one_of

PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Time units in a second."""

WORK: Final = 10**6
"""Units of work in one unit of time on one GPU; also the rate of one GPU."""

COMPLETIONS: Final[tuple[Literal["samples", "epochs", "target"], ...]] = (
    "samples", "epochs", "target",
)  # fmt: skip

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
        1-GPU time times `WORK` until completion. For a job with a `curve` and completion
        ``"target"`` it is the work of `passes` passes, and it ends when the curve is low enough.
    speedup
        Speed by GPUs.
    passes
        Data passes that `work` is made of.
    completion
        ``"samples"`` (all work), ``"epochs"`` (all passes: the same amount here) or ``"target"``.
    curve
        Uncertainty after every pass; None: the job reports none.
    priority
        1 (first) to 99; weight > 0: share; group: whose job it is.
    restart_cost
        None: that of the simulation.
    template
        Model and data; jobs of one template take similar numbers of passes.
    estimate
        Believed work over true work: what policies see that are not clairvoyant.
    micro_factor
        Multiplier on work, for effects of batch sizes inside the job; reported, never hidden.

    Raises
    ------
    InputError
        A field of a wrong type, a number that cannot be, times or work that could overflow; the
        message names the job and the field.
    """

    name: str
    submit: int = 0
    sizes: tuple[int, ...]
    work: int
    speedup: Speedup = _LINEAR
    passes: int = 1
    completion: Literal["samples", "epochs", "target"] = "samples"
    curve: Curve | None = None
    priority: int = 50
    weight: float = 1.0
    group: str = ""
    preemptible: bool = True
    restart_cost: int | None = None
    template: str = ""
    estimate: float = 1.0
    micro_factor: float = 1.0

    def __post_init__(self) -> None:
        place = f"job {format_value(line('job.name', self.name, empty=False))}: "
        own = {
            "submit": integer(f"{place}submit", self.submit),
            "sizes": ascending(f"{place}sizes", self.sizes),
            "work": integer(f"{place}work", self.work, 1, MOST_WORK),
            "passes": integer(f"{place}passes", self.passes, 1),
            "priority": integer(f"{place}priority", self.priority, 1, 99),
            "weight": number(f"{place}weight", self.weight, above=True),
            "estimate": number(f"{place}estimate", self.estimate, above=True),
            "micro_factor": number(f"{place}micro_factor", self.micro_factor, above=True),
        }
        self.__dict__.update(own)
        if self.restart_cost is not None:
            cost = integer(f"{place}restart_cost", self.restart_cost)
            self.__dict__["restart_cost"] = cost
        line(f"{place}group", self.group)
        line(f"{place}template", self.template)
        one_of(f"{place}completion", self.completion, COMPLETIONS)
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
        if self.completion == "target" and (self.curve is None or self.curve.target is None):
            raise InputError(f"{place}completion: a target needs a curve with a target")
        if self.passes > self.work:
            raise InputError(f"{place}passes: {self.passes} passes of less than one unit of work")
        self._check_times(place)

    def _check_times(self, place: str) -> None:
        total = self.work * max(self.micro_factor, 1.0) * max(self.estimate, 1.0)
        if not total <= MOST_WORK:
            raise InputError(f"{place}work: {total:.3g} by its factors is above 2^62")
        slowest = min(rates(self.speedup, self.sizes, place))
        if self.submit + -(-self.work // slowest) > MAX_INTEGER:
            raise InputError(
                f"{place}work: takes {-(-self.work // slowest)} units of time on few GPUs and "
                "would end beyond 2^53"
            )

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
