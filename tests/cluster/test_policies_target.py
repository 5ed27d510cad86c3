"""`time_to_target`: what it estimates, which jobs it displaces, and what it gains."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster import Curve, Job, Nodes, Table, entropy_workload, simulate
from optsched.cluster.policies import get
from optsched.cluster.policies import posterior as p
from optsched.cluster.workload.job import WORK
from optsched.cluster.world.layout import frozen


def learned(gaps, centre, sigma=0.5, first=float("nan")):
    """Mean and variance of log T by the kernel."""
    gaps = frozen(np.array([9.0, *gaps]))
    return p.log_passes(gaps, 1, len(gaps) - 1, first, centre, sigma, np.empty((4, p.CELLS)))


def plainly(gaps, centre, sigma=0.5, first=float("nan")):
    """The same in plain numpy, without recurrences or pruning."""
    x = np.linspace(-p.REACH * sigma, p.REACH * sigma, p.POINTS)
    known = not math.isnan(first)
    at = np.arange(0 if known else 1, len(gaps) + 1)
    y = np.array(([first] if known else []) + list(gaps))
    power = 0.5 * (len(y) + p.NOISE_WEIGHT - 1)
    density = np.zeros(p.POINTS)
    for i, passes in enumerate(np.exp(centre + x)):
        if passes <= len(gaps):
            continue
        for k in p.SHAPES:
            model = np.exp(-k * at / passes) - math.exp(-k)
            amplitude = max((y @ model) / (model @ model), 0.0)
            misfit = ((y - amplitude * model) ** 2).sum() + p.NOISE_WEIGHT * p.NOISE**2
            density[i] += misfit**-power
        density[i] *= math.exp(-0.5 * (x[i] / sigma) ** 2)
    weight = density / density.sum()
    mean = weight @ x
    return centre + mean, weight @ (x - mean) ** 2


@given(st.lists(st.floats(-0.1, 1), min_size=1, max_size=12), st.floats(3.0, 4.5),
       st.sampled_from([0.2, 0.5, 1.0]), st.sampled_from([float("nan"), 0.9]))  # fmt: skip
def test_posterior_equals_plain_code(gaps, centre, sigma, first):
    """Recurrences, closed-form amplitudes and pruning against the definition."""
    if centre + p.REACH * sigma < math.log(len(gaps) + 1):
        return
    ours, plain = learned(gaps, centre, sigma, first), plainly(gaps, centre, sigma, first)
    assert ours == pytest.approx(plain, rel=1e-6, abs=1e-6)


def test_a_curve_corrects_a_wrong_estimate():
    """With most passes done, T is known to some per cent whatever the estimate."""
    passes, k = 50, 2.5
    gaps = 0.9 * (np.exp(-k * np.arange(1, 46) / passes) - math.exp(-k))
    noisy = gaps + 0.004 * np.random.default_rng(0).standard_normal(45)
    for wrong in (0.5, 1.0, 2.0):
        mean, variance = learned(noisy.tolist(), math.log(passes * wrong))
        assert math.exp(mean) == pytest.approx(passes, rel=0.12)
        assert variance < 0.02


def test_longer_than_anybody_learned():
    """Beyond the grid the next pass is expected to be the last."""
    mean, _ = learned([0.5] * 30, math.log(2.0))
    assert math.exp(mean) == pytest.approx(31)


def situation(jobs, **prior):
    """A view of jobs and what is known of them; all in one pool."""
    n, column = len(jobs), {k: np.array([job[k] for job in jobs]) for k in jobs[0]}
    known = SimpleNamespace(
        pool=np.zeros(n, int), member_ptr=np.array([0, n]), member=np.arange(n), **prior
    )
    about = p.memory(n, 1, 0.5)
    for name in {"mean", "variance", "known"} & column.keys():
        getattr(about, name)[:] = column[name]
    about.changed[:] = True
    view = SimpleNamespace(job=np.arange(n), passes=column.get("passes"), done=column.get("done"))
    return view, known, about


@given(st.lists(st.tuples(st.floats(1, 5), st.floats(0.001, 0.3), st.booleans()), min_size=2,
                max_size=8))  # fmt: skip
def test_pooling_equals_plain_code(jobs):
    """The precision-weighted mean of all other jobs is a second witness."""
    mean, variance, known = map(list, zip(*jobs, strict=True))
    variance = [p.LEAST_VARIANCE if k else v for v, k in zip(variance, known, strict=True)]
    sure = [m for m, k in zip(mean, known, strict=True) if k]
    spread = sum((m - np.mean(sure)) ** 2 for m in sure) if sure else 0.0
    tau = (p.BETWEEN_WEIGHT * p.BETWEEN + spread) / (p.BETWEEN_WEIGHT + max(len(sure) - 1, 0))
    plain = []
    for j, m in enumerate(mean):
        others = [i for i in range(len(mean)) if i != j]
        precision = [1 / (variance[i] + tau) for i in others]
        witness = np.dot(precision, [mean[i] for i in others]) / sum(precision)
        weights = [1 / variance[j], 1 / (1 / sum(precision) + tau)]
        plain.append(m if known[j] else np.average([m, witness], weights=weights))
    rows = zip(mean, variance, known, strict=True)
    found = np.empty(len(jobs))
    view, prior, memory = situation([{"mean": m, "variance": v, "known": k} for m, v, k in rows])
    p.pooled(view, prior, memory, found)
    assert found == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(("cost", "start"), [(0, 10), (30, 10), (40, 100), (80, 100)])
def test_displaced_only_for_a_gain(cost, start):
    """90 are left against 55: the gain of 35 has to exceed the victim's restart cost."""
    jobs = [
        Job(name="long", sizes=(1,), work=100 * WORK, passes=100),
        Job(name="short", submit=10, sizes=(1,), work=55 * WORK),
    ]
    run = simulate(jobs, "time_to_target", Nodes(1, 1), restart_cost=cost)
    assert run.log.start[run.log.job == 1].tolist() == [start]


@pytest.mark.parametrize("width", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("engine", ["auto", "generic"])
def test_rounding_is_no_gain(width, engine):
    """Both have `width` left when the second arrives: logarithms may not decide."""
    flat = {"sizes": (4,), "speedup": Table({1: 1.0, 4: 1.0})}
    jobs = [
        Job(name="x", work=2 * width * WORK, **flat),
        Job(name="y", submit=width, work=width * WORK, **flat),
    ]
    log = simulate(jobs, "time_to_target", Nodes(1, 4), engine=engine).log
    assert log.start.tolist() == [0, 2 * width]


def test_a_template_corrects_a_wrong_estimate():
    """Seven right estimates outvote the eighth, that claims to be short."""
    curve = Curve(1.0, 0.1, 0.1, 0.3, 0.0)
    jobs = [
        Job(name=f"j{i}", sizes=(1,), work=16 * WORK, passes=16, curve=curve,
            template="a", estimate=int(0.2 * 16 * WORK) if i == 7 else None)
        for i in range(8)
    ]  # fmt: skip
    other = Job(name="other", sizes=(1,), work=10 * WORK)
    alone = simulate([*jobs, other], get("time_to_target", pool=False), Nodes(1, 1)).log
    together = simulate([*jobs, other], "time_to_target", Nodes(1, 1)).log
    assert alone.job[0] == 7
    assert together.job[0] == 8


def test_gain_over_the_same_estimates():
    """Prototype: .93 of elastic SJF's mean completion time, .98 with each job's own curve only."""
    ratio = {True: [], False: []}
    last = []
    for seed in range(6):
        jobs = entropy_workload(50, seed).with_estimate_error(0.5, seed + 50)
        sjf = simulate(jobs, get("elastic", order="sjf"), Nodes(1, 4))
        for pool, found in ratio.items():
            ours = simulate(jobs, get("time_to_target", pool=pool), Nodes(1, 4))
            found.append(ours.jct.mean() / sjf.jct.mean())
        last.append(ours.log.finished.max() / sjf.log.finished.max())
    assert np.mean(ratio[True]) < 0.95
    assert np.mean(ratio[True]) < np.mean(ratio[False]) < 1.01
    assert np.mean(last) < 1.02
