"""A training job of a simulated cluster, its uncertainty by passes, the ranges of its fields."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.speedup import MOST_GPUS, Linear, Speedup
from optsched.errors import InputError
from optsched.io.values import format_value, integer, label, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Time units in a second."""

WORK: Final = 10**6
"""Units of work in one unit of time on one GPU; also the rate of one GPU."""

MOST_PASSES: Final = 10_000
"""Passes after which a target that was not reached counts as never reached."""

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


@dataclass(frozen=True)
class Curve:
    """Lower uncertainty: U(p) = U_inf + (U_0 - U_inf) exp(-kappa p) after pass p, plus noise.

    U_0 is `initial`, U_inf `final`, `kappa` > 0. A job is done after the first pass with a report
    of at most `target` (None: it does not end so). `noise` is the standard deviation of reports,
    which are normal, seeded, and stay >= 0.

    Examples
    --------
    >>> curve = optsched.cluster.Curve(initial=0.9, final=0.1, kappa=0.5, target=0.2)
    >>> curve.reached(seed=0, name="job").round(2).tolist()
    [0.59, 0.39, 0.28, 0.21, 0.17]
    """

    initial: float
    final: float
    kappa: float
    target: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        for key in ("initial", "final", "noise"):
            number(f"curve.{key}", getattr(self, key))
        number("curve.kappa", self.kappa, above=True)
        final = f"the final {format_value(self.final)}"
        if self.initial < self.final:
            what = f"{format_value(self.initial)} is below {final}: uncertainty falls"
            raise InputError(f"curve.initial: {what}")
        if self.target is not None and not self.final < number("curve.target", self.target):
            what = f"{format_value(self.target)} is not above {final}: never reached"
            raise InputError(f"curve.target: {what}")

    def reported(self, passes: int, seed: int, name: str) -> npt.NDArray[np.float64]:
        """U with noise after 1, 2, ..., `passes` passes; the noise depends on seed and name only.

        A longer row begins with the shorter one.
        """
        p = np.arange(1, passes + 1, dtype=np.float64)
        values = self.final + (self.initial - self.final) * np.exp(-self.kappa * p)
        if self.noise == 0:
            return values
        key = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        random = np.random.default_rng([integer("seed", seed), int.from_bytes(key, "little")])
        return np.asarray(np.maximum(values + self.noise * random.standard_normal(passes), 0.0))

    def reached(self, seed: int, name: str) -> npt.NDArray[np.float64]:
        """Reports up to the first at or below the target; as many as the job takes passes."""
        if self.target is None:
            raise InputError("curve.target: missing, but the job is to end by it")
        for tried in (64, 512, MOST_PASSES):
            values = self.reported(tried, seed, name)
            below = np.flatnonzero(values <= self.target)
            if len(below):
                return values[: below[0] + 1]
        raise InputError(
            f"curve.target: {self.target} is not reached in {MOST_PASSES} passes (the curve is at "
            f"{values[-1]:.6g}); raise it, or kappa"
        )


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
