"""Generated workloads: the reference one has exactly what the page says; both keep their load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from optsched.cluster.workload.job import WORK
from optsched.cluster.workload.speedup import Amdahl
from optsched.cluster.workload.synthetic import REFERENCE, entropy_workload, synthetic
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.cluster.workload.workload import Workload


def services(w: Workload, gpus: int = 2) -> Any:
    """Time of every job on so many GPUs."""
    rate = w.rate[w.size == gpus]
    assert len(rate) == len(w)
    return -(-w.work // rate)


def test_the_reference_workload() -> None:
    """Counts, passes, pass times and the mean of section 7, at t=0, in random order."""
    w = entropy_workload(seed=4)
    kinds = [name.split("-")[0] for name in w.names]
    counts = {kind.name: kinds.count(kind.name) for kind in REFERENCE}
    assert list(counts.values()) == [8, 8, 8, 6, 5, 5, 5, 5]
    assert [k.passes for k in REFERENCE] == [50, 50, 50, 20, 20, 20, 20, 20]
    assert w.submit.tolist() == [0] * 50 and kinds != sorted(kinds)
    assert kinds != [n.split("-")[0] for n in entropy_workload(seed=5).names]
    assert services(w).mean() == pytest.approx(0.79 * 3600, rel=1e-3)
    assert [k.samples // 10**4 for k in REFERENCE] == [6, 6, 5, 5, 5, 5, 10, 10]
    times = [k.samples / 16 * k.step_ms for k in REFERENCE]
    assert [k.step_ms for k in REFERENCE] == [12, 15, 12, 20, 22, 12, 25, 40]
    first = w.pass_work[kinds.index("J1")] / times[0]
    for i, name in enumerate(kinds):  # all pass times are scaled by one factor
        k = [kind.name for kind in REFERENCE].index(name)
        assert w.pass_work[i] / times[k] == pytest.approx(first, rel=1e-6)
    assert w.sizes_of(0).tolist() == [1, 2, 3, 4]
    assert w.rates_of(0).tolist() == [round(WORK * Amdahl(0.522).of(g)) for g in (1, 2, 3, 4)]
    assert [w.templates[t] for t in w.template] == kinds


def test_options_of_the_reference_workload() -> None:
    """Each changes what it says and nothing else."""
    base = entropy_workload(seed=2)
    assert entropy_workload(seed=2) == base != entropy_workload(seed=3)
    rigid = entropy_workload(seed=2, sizes=(2,))
    assert rigid.size.tolist() == [2] * 50 and (rigid.work == base.work).all()
    table8 = entropy_workload(2000, seed=2, mean_service=437.0, gpus=64, sizes=[1, 2, 4])
    assert services(table8).mean() == pytest.approx(437, rel=2e-3)
    shares = np.bincount(table8.template) / 2000
    assert abs(shares - np.array([8, 8, 8, 6, 5, 5, 5, 5]) / 50).max() < 0.03
    slow = entropy_workload(seed=2, c=1.0)
    assert services(slow).mean() == pytest.approx(0.79 * 3600, rel=1e-3)
    arriving = entropy_workload(4000, seed=2, load=0.9, gpus=4)
    span = int(arriving.submit[-1])
    assert 2 * services(arriving).sum() / (4 * span) == pytest.approx(0.9, rel=0.06)


def test_synthetic_load_and_shape() -> None:
    """GPU time per unit of time is the load; durations are heavy-tailed; sizes as asked."""
    w = synthetic(20_000, 0.8, 1, gpus=128)
    duration = w.work // w.rate
    offered = float((w.size * duration.astype(float)).sum()) / (128 * int(w.submit[-1]))
    assert offered == pytest.approx(0.8, rel=0.05)
    assert w.submit[0] == 0 and duration.min() >= 10
    assert duration.mean() > 5 * np.median(duration)
    assert (w.size == 1).mean() == pytest.approx(0.93, abs=0.01)
    assert synthetic(50, 0.8, 1, gpus=4).size.max() <= 4
    assert synthetic(50, 0.8, 1) == synthetic(50, 0.8, 1) != synthetic(50, 0.8, 2)


def test_synthetic_elastic_jobs() -> None:
    """Powers of two up to four times the own size; work is that of the own size."""
    rigid, elastic = synthetic(300, seed=3), synthetic(300, seed=3, elastic=True)
    for i in range(300):
        own = int(rigid.size[i])
        assert elastic.sizes_of(i).tolist() == [2**k for k in range(7) if 2**k <= 4 * own]
        at = elastic.sizes_of(i).tolist().index(own)
        assert elastic.work[i] // elastic.rates_of(i)[at] == rigid.work[i] // rigid.rate[i]
    owners = synthetic(500, groups=4, passes=3)
    assert len(owners.groups) == 4 and set(owners.passes.tolist()) == {3}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (synthetic, {"jobs": 0}, "jobs"),
        (synthetic, {"jobs": 5, "load": 0}, "load"),
        (synthetic, {"jobs": 5, "gpus": 0}, "gpus"),
        (synthetic, {"jobs": 5, "seed": -1}, "seed"),
        (synthetic, {"jobs": 5, "duration": (9, -1)}, "sigma"),
        (synthetic, {"jobs": 5, "duration": (0, 1)}, "median"),
        (synthetic, {"jobs": 5, "load": 1e7}, "load: expected a number > 0 and <= 1e"),
        (synthetic, {"jobs": 5, "load": 5e-324}, r"load: so low that the last of 5 .* 2\^53"),
        (entropy_workload, {"load": 5e-324}, "load: so low"),
        (synthetic, {"jobs": 5, "sizes": {8: 1.0}, "gpus": 4}, "no gang"),
        (synthetic, {"jobs": 5, "sizes": {1: -1.0}}, "sizes"),
        (entropy_workload, {"jobs": 0}, "jobs"),
        (entropy_workload, {"c": 2.0}, "Amdahl"),
        (entropy_workload, {"sizes": []}, "sizes: expected ascending"),
        (entropy_workload, {"mean_service": 0}, "mean_service"),
        (entropy_workload, {"load": -1}, "load"),
    ],
)
def test_workloads_that_cannot_be(make: Any, options: dict[str, Any], message: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=message):
        make(**options)
