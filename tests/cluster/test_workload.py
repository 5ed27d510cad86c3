"""Jobs, speed-ups, curves and their columns: what goes in comes out, what cannot be is refused."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster.workload.job import WORK, Curve, Job, rates
from optsched.cluster.workload.speedup import Amdahl, Linear, Table
from optsched.cluster.workload.workload import Group, Workload
from optsched.errors import InputError

SPEEDUPS = (Linear(), Amdahl(0.522), Table({1: 1, 2: 1.9, 3: 2.7, 4: 3.1, 8: 5}))


@st.composite
def jobs(draw: st.DrawFn, name: str) -> Job:
    """Any legal job."""
    curve = None
    target = draw(st.sampled_from([None, 0.3]))
    if target is not None or draw(st.booleans()):
        curve = Curve(0.9, 0.1, draw(st.floats(0.05, 1)), target, draw(st.sampled_from([0, 0.05])))
    return Job(
        name=name,
        submit=draw(st.integers(0, 20)),
        sizes=draw(st.sampled_from([(1,), (2,), (1, 2, 4), (0,), (3, 4)])),
        work=draw(st.integers(100, 10**12)),
        speedup=draw(st.sampled_from(SPEEDUPS)),
        passes=draw(st.integers(1, 60)),
        curve=curve,
        priority=draw(st.integers(1, 99)),
        weight=draw(st.floats(0.1, 10)),
        group=draw(st.sampled_from(["", "a", "b"])),
        preemptible=draw(st.booleans()),
        restart_cost=draw(st.sampled_from([None, 0, 7])),
        template=draw(st.sampled_from(["", "m1", "m2"])),
        estimate=draw(st.one_of(st.none(), st.integers(1, 10**12))),
        speeds=draw(st.dictionaries(st.sampled_from(["A100", "V100"]), st.floats(0.5, 2))),
        cpus_per_gpu=draw(st.sampled_from([0.0, 2.5])),
    )


@st.composite
def many(draw: st.DrawFn) -> list[Job]:
    """Some jobs of different names."""
    n = draw(st.integers(1, 8))
    return [draw(jobs(f"j{i}")) for i in range(n)]


@given(many(), st.integers(0, 9))
def test_columns_hold_the_jobs(given_jobs: list[Job], seed: int) -> None:
    """Every column against the jobs, one by one."""
    w = Workload.of(given_jobs, seed=seed)
    order = sorted(range(len(given_jobs)), key=lambda i: (given_jobs[i].submit, i))
    assert len(w) == len(given_jobs)
    for row, i in enumerate(order):
        job = given_jobs[i]
        assert w.names[row] == job.name and w.submit[row] == job.submit
        assert tuple(w.sizes_of(row)) == job.sizes
        for size, rate in zip(job.sizes, w.rates_of(row).tolist(), strict=True):
            assert rate == (round(WORK * job.speedup.of(size)) if size else WORK)
        reports = w.observed[w.observed_ptr[row] : w.observed_ptr[row + 1]]
        by_target = job.curve is not None and job.curve.target is not None
        passes = len(reports) if by_target else job.passes
        assert w.passes[row] == passes and len(reports) == (passes if job.curve else 0)
        if by_target:
            assert reports[-1] <= 0.3 and (reports[:-1] > 0.3).all() and w.target[row] == 0.3
            work = math.ceil(Fraction(job.work, job.passes)) * passes
            work = job.work if passes == job.passes else work
        else:
            assert math.isnan(w.target[row])
            work = job.work
        assert w.work[row] == work
        assert w.estimate[row] == (work if job.estimate is None else job.estimate)
        assert w.pass_work[row] == math.ceil(Fraction(int(w.work[row]), passes))
        assert w.groups[w.group[row]].name == job.group
        assert (w.templates[w.template[row]] if w.template[row] >= 0 else "") == job.template
        assert w.restart_cost[row] == (-1 if job.restart_cost is None else job.restart_cost)
        assert (w.priority[row], w.weight[row]) == (job.priority, job.weight)
        assert w.preemptible[row] == job.preemptible
        assert w.cpus_per_gpu[row] == job.cpus_per_gpu and w.memory_per_gpu_gb[row] == 0
        found = dict(zip(w.types, w.speeds[row].tolist(), strict=True))
        assert found == dict.fromkeys(w.types, 1.0) | dict(job.speeds)
        assert (w.initial[row] == 0.9) == (job.curve is not None)


@given(many(), st.data())
def test_taking_some(given_jobs: list[Job], data: st.DataObject) -> None:
    """Numbers, masks and slices agree, and every job is still the same."""
    w = Workload.of(given_jobs)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(w) - 1), min_size=1)))
    part = w.take(chosen)
    mask = np.zeros(len(w), np.bool_)
    mask[chosen] = True
    assert w.take(mask) == part == w.take(chosen[::-1]) and w[:] == w
    by_name = {job.name: job for job in given_jobs}
    alone = Workload.of([by_name[name] for name in part.names])
    for key in ("submit", "work", "passes", "estimate", "size", "rate", "observed", "size_ptr"):
        assert (getattr(part, key) == getattr(alone, key)).all()


def plain(**changes: Any) -> Job:
    """A job, a little changed."""
    return Job(**({"name": "a", "sizes": (1, 2), "work": 10**6} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 7}, r"jobs\[0\].name: expected a string"),
        ({"name": "x" * 201}, "longer than 200"),
        ({"name": "a\nb"}, "name: control characters"),
        ({"template": "\x1b[31m"}, "template: control characters"),
        ({"submit": -1}, r'job "a": submit: expected an integer in 0\.\.2\^53, got -1'),
        ({"sizes": ()}, "sizes: expected ascending"),
        ({"sizes": (2, 1)}, "ascending"),
        ({"sizes": 4}, "numbers of GPUs such as"),
        ({"sizes": (2**30,)}, "2\\^24"),
        ({"work": 0}, "work: expected an integer in 1"),
        ({"speedup": None}, "speedup: expected Linear"),
        ({"passes": 10**7}, "less than one unit of work"),
        ({"curve": 1}, "expected a Curve"),
        ({"passes": 2**64}, r'job "a": passes: expected an integer in 1'),
        ({"priority": 0}, r"priority: expected an integer in 1\.\.99"),
        ({"weight": 0}, "weight: expected a finite number > 0"),
        ({"group": None}, "group: expected a string"),
        ({"preemptible": 1}, "expected True or False"),
        ({"estimate": 0.5}, "estimate: expected an integer"),
        ({"cpus_per_gpu": -1}, "cpus_per_gpu: expected a number >= 0"),
        ({"speeds": {"A100": 1001}}, 'job "a": speeds."A100".: expected a number .*1000'),
        ({"speeds": [1.0]}, "expected speeds by type"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    """One sentence with the job and the field."""
    with pytest.raises(InputError, match=message):
        Workload.of([plain(**changes)])


def three() -> Workload:
    """Three jobs."""
    return Workload.of([plain(name=name) for name in "abc"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Workload.of([]), "at least one job"),
        (lambda: Workload.of([plain(), plain()]), r'jobs\[1\].name: "a" appears twice'),
        (lambda: Workload.of([plain(), 3]), r"jobs\[1\]: expected a Job"),  # type: ignore[list-item]
        (lambda: Workload.of("ab"), "expected a list of Job"),  # type: ignore[arg-type]
        (lambda: Workload.of([plain()], time_unit="h"), "expected one of ns, us, ms, s"),
        (lambda: Workload.of([plain()], seed=-1), "seed"),
        (lambda: Workload.of([plain()], groups=[Group("g"), Group("g")]), "twice"),
        (lambda: Workload.of([plain()], groups=[Group("g", -1.0)]), "weight"),
        (lambda: Workload.of([plain()], groups=[Group("g", 1, 1, 0)]), "max_concurrent"),
        (lambda: Workload.of([plain()], groups=[Group("g", 1, 1, 1, 100)]), "priority"),
        (lambda: Workload.of([plain()], groups=["g"]), "expected a Group"),  # type: ignore[list-item]
        (
            lambda: Workload.of([plain(name=str(i), sizes=(1,), work=2**62) for i in range(4000)]),
            "one after the other",
        ),
        (lambda: Workload.of([plain(submit=2**53)]), 'job "a": .* would end beyond 2\\^53'),
        (lambda: Workload.of([plain(speedup=Table({4: 2.0}))]), 'job "a": .*no speed for 1 GPUs'),
        (lambda: Workload.of([plain()]).changed(colour=1), "no column .* cpus_per_gpu, estimate"),
        (lambda: three().changed(work=three().work[:2]), "work: expected 3 values, one per job"),
        (lambda: three().changed(work=[[10**6]] * 3), "work: expected an integer"),
        (lambda: Workload.of([plain()]).changed(names=("\ud800",)), r"jobs\[0\].name"),
        (lambda: Workload.of([plain()]).changed(source=["a\nb"]), "source: control characters"),
        (lambda: Workload.of([plain()], groups=[Group("a\0b")]), "control characters"),
        (
            lambda: Workload.of([plain()]).changed(submit=np.array([-1])),
            "submit: expected an integer in 0",
        ),
        (lambda: Workload.of([plain()]).changed(size=np.array([2, 1])), "ascending sizes"),
        (lambda: Workload.of([plain()]).changed(rate=np.array([1, 0])), "rate"),
        (lambda: three().changed(speeds=[[1.0]]), "speeds: expected 3 rows for 0"),
        (lambda: three().changed(cpus_per_gpu=[0, 1, -1]), 'job "c": cpus_per_gpu: expected a'),
        (lambda: Workload.of([plain()]).take([]), "none chosen"),
        (lambda: Workload.of([plain()]).take([1]), "numbers in 0..0"),
        (lambda: Workload.of([plain()])["a"], "expected a slice"),  # type: ignore[index]
        (lambda: Workload.of([plain()]).with_estimate_error(0.5, 1.5), "seed"),  # type: ignore[arg-type]
        (
            lambda: Workload.of([plain()]).with_estimate_error(100.0, 1),
            "sigma: expected a number >= 0 and <= 10",
        ),
    ],
)
def test_workloads_that_cannot_be(build: Any, message: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=message):
        build()


def test_what_follows_a_change() -> None:
    """The work of a pass follows the work; the estimate stays."""
    w = Workload.of([plain(passes=7, estimate=2 * 10**6)])
    more = w.changed(work=np.array([10**6 + 1]))
    assert more.pass_work[0] == math.ceil((10**6 + 1) / 7) and more.estimate[0] == 2 * 10**6
    assert w.changed(passes=np.array([3])).pass_work[0] == 333_334


def test_estimate_errors() -> None:
    """Seeded, lognormal, and on top of earlier estimates."""
    w = Workload.of([plain(name=str(i), work=10**9) for i in range(4000)])
    one = w.with_estimate_error(0.5, 1)
    assert one == w.with_estimate_error(0.5, 1) != w.with_estimate_error(0.5, 2)
    logs = np.log(one.estimate / one.work)
    assert abs(logs.mean()) < 0.03 and abs(logs.std() - 0.5) < 0.02
    assert w.with_estimate_error(0.0, 1) == w
    assert (one.work == w.work).all()


# speed-ups


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Amdahl(1.1), r"share in \[0, 1\]"),
        (lambda: Table({}), "expected {GPUs: speed}"),
        (lambda: Table({1: 2.0}), "relative to one GPU"),
        (lambda: Table({2: 0.0}), "> 0"),
        (lambda: Table({0: 1.0}), "GPUs"),
        (lambda: Table({1: 1.0}).of(2), "no speed for 2"),
        (lambda: rates(Table({1: 1.0, 2: 1e-9}), (2,)), "outside"),
    ],
)
def test_speedups_that_cannot_be(build: Any, message: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=message):
        build()


# curves


@given(
    st.floats(0, 0.5), st.floats(0.01, 0.5), st.floats(0.01, 2), st.integers(1, 50),
    st.floats(0, 0.1), st.integers(0, 99),
)  # fmt: skip
def test_curves(
    final: float, drop: float, kappa: float, passes: int, noise: float, seed: int
) -> None:
    """Formula, noise that only depends on seed and name, longer rows begin with shorter ones."""
    clean = Curve(final + drop, final, kappa).reported(passes, seed, "x")
    for p, value in enumerate(clean, 1):
        assert value == pytest.approx(final + drop * math.exp(-kappa * p))
    curve = Curve(final + drop, final, kappa, noise=noise)
    values = curve.reported(passes, seed, "x")
    assert (values >= 0).all() and (curve.reported(2 * passes, seed, "x")[:passes] == values).all()
    if noise > 0.01 and values.min() > 0:
        assert (curve.reported(passes, seed, "y") != values).any()
        assert (curve.reported(passes, seed + 1, "x") != values).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Curve(0.1, 0.2, 1), "uncertainty falls"),
        (lambda: Curve(1, 0, 0), "curve.kappa"),
        (lambda: Curve(1, 0.5, 1, 0.4), "never reached"),
        (lambda: Curve(1, 0.1, 1, 0.1), "curve.target: 0.1 is not above the final 0.1"),
        (lambda: Curve(1, 0.5, 1, 0.6, -0.1), "curve.noise"),
        (lambda: Curve(1, 0.5, 1).reached(0, "x"), "missing"),
        (lambda: Curve(1, 0.5, 1e-9, 0.6).reached(0, "x"), "not reached in 10000 passes"),
        (
            lambda: Workload.of([plain(curve=Curve(1, 0.5, 1e-9, 0.6), name="slow")]),
            'job "slow": curve.target',
        ),
    ],
)
def test_curves_that_cannot_be(build: Any, message: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=message):
        build()
