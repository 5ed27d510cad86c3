"""Generated workloads: a heavy-tailed one with Poisson arrivals, and the reference one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.cluster.workload.job import MOST_WORK, WORK, Curve, Job, ascending
from optsched.cluster.workload.speedup import Amdahl, Linear, Speedup
from optsched.cluster.workload.workload import Workload
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.model.schedule import IntArray

PHILLY_SIZES: Final[dict[int, float]] = {
    1: 0.93, 2: 0.022, 4: 0.023, 8: 0.02, 16: 0.004, 32: 0.001
}  # fmt: skip
"""Shares of gangs, about those of the Philly trace (Jeon et al., ATC 2019)."""

PHILLY_DURATION: Final = (1100.0, 2.1)
"""Median in seconds and sigma of the logarithm of durations, likewise."""

MOST_LOAD: Final = 1e6


def synthetic(
    jobs: int,
    load: float = 0.9,
    seed: int = 0,
    *,
    gpus: int = 64,
    duration: tuple[float, float] = PHILLY_DURATION,
    sizes: Mapping[int, float] | None = None,
    elastic: bool = False,
    groups: int = 1,
    passes: int = 1,
) -> Workload:
    """Draw jobs with Poisson arrivals, lognormal durations and Philly-like gangs, in seconds.

    Parameters
    ----------
    load
        GPU time that arrives per unit of time, over `gpus`; larger gangs are not drawn.
    duration
        Median in seconds at the drawn size, and sigma of its logarithm; cut to 10 s .. 30 days.
    sizes
        Gangs with their shares; `PHILLY_SIZES` by default.
    elastic
        Jobs may also take any power of two up to four times the drawn size, with a speed-up of
        ``Amdahl(0.1)`` instead of ``Linear()``.
    groups
        Number of users, ``u0`` the most active.

    Examples
    --------
    >>> optsched.cluster.synthetic(100, load=0.9, seed=0, gpus=16)
    <Workload 'synthetic:100': 100 jobs, submitted 0..52493 s>
    """
    integer("jobs", jobs, 1, 10**7)
    number("load", load, 0.0, MOST_LOAD, above=True)
    integer("gpus", gpus, 1, 2**24)
    integer("groups", groups, 1, 10**6)
    random = np.random.default_rng(integer("seed", seed))
    shares = {
        integer("sizes", size, 1, 2**24): number(f"sizes[{format_value(size)}]", share)
        for size, share in (PHILLY_SIZES if sizes is None else sizes).items()
        if size <= gpus
    }
    total = sum(shares.values())
    if total <= 0:
        raise InputError(f"sizes: no gang with a positive share has at most {gpus} GPUs")
    gang = random.choice(list(shares), jobs, p=np.array(list(shares.values())) / total)
    median = number("duration: median", duration[0], above=True)
    sigma = number("duration: sigma", duration[1], 0.0, 10.0)
    logs = math.log(median) + sigma * random.standard_normal(jobs)
    seconds = np.clip(np.exp(np.minimum(logs, 700.0)), 10.0, 30 * 86_400.0)
    lasts = np.rint(seconds).astype(np.int64)
    submit = _poisson(random, float((gang * lasts).mean()) / (load * gpus), jobs)
    owner = np.minimum(random.exponential(groups / 3, jobs).astype(np.int64), groups - 1)
    law: Speedup = Amdahl(0.1) if elastic else Linear()
    digits = len(str(jobs - 1))
    made = []
    for i, (g, d) in enumerate(zip(gang.tolist(), lasts.tolist(), strict=True)):
        allowed = {2**k for k in range(25) if 2**k <= min(4 * g, gpus)} if elastic else set()
        made.append(Job(
            name=f"s{i:0{digits}d}", submit=int(submit[i]), sizes=tuple(sorted(allowed | {g})),
            work=d * round(WORK * law.of(g)), speedup=law, passes=passes, group=f"u{owner[i]}",
        ))  # fmt: skip
    return Workload.of(made, name=f"synthetic:{jobs}", seed=seed)


def _poisson(random: np.random.Generator, gap: float, jobs: int) -> IntArray:
    """Arrivals from 0 on, with exponential gaps of this mean."""
    times = np.rint(np.cumsum(random.exponential(min(gap, 2.0**60), jobs)))
    if times[-1] > MAX_INTEGER:
        raise InputError(f"load: so low that the last of {jobs} jobs would come beyond 2^53")
    return np.asarray(times - times[0], np.int64)


class Kind(NamedTuple):
    """One kind of job of the reference workload."""

    name: str
    count: int  # type: ignore[assignment]  # tuple.count
    passes: int
    samples: int
    step_ms: int
    curve: tuple[float, float, float]
    """U_0, U_inf, and kappa times the passes: our assumption, the source gives no curves."""


REFERENCE: Final = (
    Kind("J1", 8, 50, 60_000, 12, (0.92, 0.05, 3.0)),
    Kind("J2", 8, 50, 60_000, 15, (0.95, 0.12, 2.5)),
    Kind("J3", 8, 50, 50_000, 12, (0.97, 0.20, 2.2)),
    Kind("J4", 6, 20, 50_000, 20, (0.97, 0.15, 2.5)),
    Kind("J5", 5, 20, 50_000, 22, (0.98, 0.25, 2.0)),
    Kind("J6", 5, 20, 50_000, 12, (0.98, 0.30, 2.8)),
    Kind("J7", 5, 20, 100_000, 25, (0.99, 0.35, 2.3)),
    Kind("J8", 5, 20, 100_000, 40, (0.99, 0.40, 2.0)),
)
"""J1..J8 of the Entropy paper (Table 2): counts, passes and samples as printed there; steps and
curves are our assumptions. The paper does not say which has which priority."""

BATCH: Final = 16
GANG: Final = 2
MEAN_SERVICE: Final = 0.79 * 3600
"""Seconds on two GPUs: from the paper's Table 4."""
SPREAD: Final = 0.1
"""Sigma of the lognormal factor on the passes that a job's curve needs."""
NOISE: Final = 0.004
"""Standard deviation of reported uncertainty."""


def entropy_workload(
    jobs: int = 50,
    seed: int = 0,
    *,
    c: float = 0.522,
    gpus: int = 4,
    sizes: Sequence[int] | None = None,
    mean_service: float = MEAN_SERVICE,
    load: float | None = None,
) -> Workload:
    """Make the reference workload for the Entropy paper; times in seconds.

    J1..J8 with counts 8,8,8,6,5,5,5,5, as printed; with another number of jobs the kinds are drawn
    with these frequencies. All come at t=0 in random order unless there is a `load`. The paper
    gives no step times: ours are scaled so that the mean service of these very jobs on two GPUs is
    `mean_service`.

    Parameters
    ----------
    c
        Amdahl share: .522 from the paper's service times.
    gpus
        GPUs of the cluster: largest size, and what a load is relative to.
    sizes
        Sizes of elastic jobs; ``1..gpus`` by default, ``(2,)`` for the paper's gangs.
    mean_service
        Seconds on two GPUs; 437 for Table 8.
    load
        Poisson arrivals: GPU time on two GPUs that arrives per unit of time, over `gpus`.

    Examples
    --------
    >>> jobs = optsched.cluster.entropy_workload(seed=0)
    >>> len(jobs), jobs.templates[:3]
    (50, ('J1', 'J2', 'J3'))
    """
    integer("jobs", jobs, 1, 10**6)
    integer("gpus", gpus, 1, 2**24)
    number("mean_service", mean_service, above=True)
    random = np.random.default_rng(integer("seed", seed))
    counts = np.array([kind.count for kind in REFERENCE])
    if jobs == counts.sum():
        order = random.permutation(np.repeat(np.arange(len(REFERENCE)), counts))
    else:
        order = random.choice(len(REFERENCE), jobs, p=counts / counts.sum())
    kinds, law = [REFERENCE[k] for k in order.tolist()], Amdahl(c)
    allowed = ascending("sizes", range(1, gpus + 1) if sizes is None else sizes)
    factor = np.exp(SPREAD * random.standard_normal(jobs)).tolist()
    submit = np.zeros(jobs, np.int64)
    if load is not None:
        share = number("load", load, 0.0, MOST_LOAD, above=True) * gpus
        submit = _poisson(random, GANG * mean_service / share, jobs)
    names = [f"{kind.name}-{i:0{len(str(jobs - 1))}d}" for i, kind in enumerate(kinds)]
    curves = []
    for kind, times in zip(kinds, factor, strict=True):  # at the target after passes * times
        begin, end, bend = kind.curve
        target = end + (begin - end) * math.exp(-bend)
        curves.append(Curve(begin, end, bend / (kind.passes * times), target, NOISE))
    passes = [len(curve.reached(seed, name)) for curve, name in zip(curves, names, strict=True)]
    raw = np.array([k.samples / BATCH * k.step_ms for k in kinds])  # of a pass, on one GPU
    mean = float((raw * passes).mean()) / law.of(GANG)
    scale = mean_service / mean * WORK
    made = []
    for i, kind in enumerate(kinds):
        pass_work = max(1, round(min(raw[i] * scale, float(MOST_WORK))))
        made.append(Job(
            name=names[i], submit=int(submit[i]), sizes=allowed, speedup=law,
            work=integer("mean_service: work", pass_work * passes[i], 1, MOST_WORK),
            passes=passes[i], curve=curves[i], template=kind.name,
        ))  # fmt: skip
    return Workload.of(made, name=f"entropy:{jobs}", seed=seed)
