"""Cuts into stages: the dynamic programme against all cuts, and the best by its schedule."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import InputError, JobArray
from optsched.pipelines import interleaved, one_f_one_b, partition, wrapped, zb_h1
from optsched.pipelines.cuts import best_cuts
from optsched.problems.jobarray.derived import merged

if TYPE_CHECKING:
    from collections.abc import Sequence

LOADS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def every(n: int, stages: int) -> list[list[int]]:
    """All cuts of n layers."""
    return [[0, *cut, n] for cut in combinations(range(1, n), stages - 1)]


@given(LOADS, st.integers(1, 4), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_best_cuts_are_the_best_of_all(
    loads: list[int], stages: int, count: int, draw: Any
) -> None:
    """The least bottlenecks, with links and memory, by brute force; none twice."""
    n = len(loads)
    stages = min(stages, n)
    links = [draw.randint(0, 9) for _ in loads[1:]]
    kept, limits = [draw.randint(0, 5) for _ in loads], [draw.randint(5, 20) for _ in range(4)]

    def fits(stage: int, first: int, end: int) -> bool:
        return sum(kept[first:end]) <= limits[stage]

    def bottleneck(cut: Sequence[int]) -> int:
        parts = [sum(loads[a:b]) for a, b in pairwise(cut)]
        return max([*parts, *(links[k - 1] for k in cut[1:-1])])

    rows = [
        cut
        for cut in every(n, stages)
        if all(fits(v, a, b) for v, (a, b) in enumerate(pairwise(cut)))
    ]
    found = best_cuts(loads, stages, count, links=links, fits=fits)
    assert [one.bottleneck for one in found] == sorted(map(bottleneck, rows))[:count]
    assert [bottleneck(one.cuts) for one in found] == [one.bottleneck for one in found]
    assert len({tuple(one.cuts) for one in found}) == len(found)


def layers(draw: Any, jobs: int, n: int, **options: Any) -> JobArray:
    """Random layers of some jobs."""
    shape, cuts = (jobs, n), (jobs, n - 1)

    def table(shape: tuple[int, int], most: int) -> list[list[int]]:
        return [[draw.randint(0, most) for _ in range(shape[1])] for _ in range(shape[0])]

    forward = [[1 + t for t in row] for row in table(shape, 5)]
    return JobArray(
        forward, table(shape, 9), update=table(shape, 3), lag_forward=table(cuts, 3),
        lag_backward=table(cuts, 3), activation=table(shape, 4), state=table(shape, 4), **options,
    )  # fmt: skip


@few_examples
@given(st.integers(2, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_best_schedule_of_all_cuts(n: int, micro_batches: int, draw: Any) -> None:
    """With all cuts as candidates nothing is better; the bound holds for every cut."""
    array = layers(draw, 1, n, micro_batches=micro_batches)
    stages = draw.randint(1, n)
    found = partition(array, stages, schedule=one_f_one_b, candidates=99)
    values = {tuple(cut[1:-1]): one_f_one_b(merged(array, cut)).makespan
              for cut in every(n, stages)}  # fmt: skip
    assert dict(found.tried) == values
    assert found.value == min(values.values()) == values[found.cuts] >= found.lower_bound
    assert found.names == tuple(map(str, found.cuts))
    assert optsched.verify(found.schedule) == []


def test_the_best_cut_of_one_job_is_not_that_of_an_array() -> None:
    """Jobs whose layers differ: each alone is cut elsewhere than both together."""
    one, other = [[9, 2, 2, 2]], [[2, 2, 2, 9]]
    both = JobArray(one + other, one + other, objective="period")
    cuts = [partition(array, 2).cuts for array in (both.subset([0]), both.subset([1]), both)]
    alone = [c for c in cuts[:2] if c != cuts[2]]
    assert cuts[2] == (2,) and len(alone) >= 1
    found = partition(both, 2)
    assert found.value == found.lower_bound == 30
    assert "0.0% above the lower bound" in str(found)


def test_memory_states_and_what_is_in_flight() -> None:
    """States are subtracted; a stage that keeps more micro-batches gets fewer layers."""
    array = JobArray(
        [[2] * 6], [[4] * 6], micro_batches=8, activation=10, state=[[100] * 6]
    )  # fmt: skip
    free = partition(array, 3, schedule=one_f_one_b)
    assert free.cuts == (2, 4)
    tight = partition(array, 3, 380, schedule=one_f_one_b, in_flight=[3, 2, 1])
    assert tight.array.memory.tolist() == [380 - 100 * w for w in np.diff([0, *tight.cuts, 6])]
    assert optsched.verify(tight.schedule) == []
    small = partition(array, 3, 270, schedule=one_f_one_b, in_flight=[3, 2, 1])
    assert small.cuts == (2, 4)
    with pytest.raises(InputError, match="memory: no cut into 3 stages fits into 199 bytes"):
        partition(array, 3, 199)
    with pytest.raises(InputError, match=r"memory: none of the .* best cuts has a schedule"):
        partition(array, 3, 230, schedule=one_f_one_b)


def test_pipelines_with_chunks_and_split_backward() -> None:
    """Chunks on devices, and blocks I and W: the same call with another schedule."""
    array = JobArray([[1, 2, 3, 4, 2, 2, 1, 3]], [[2] * 8], weight=[[1] * 8], micro_batches=4)
    chunked = partition(array, 4, schedule=interleaved, place=wrapped(2, 2))
    assert chunked.array.place == wrapped(2, 2) and chunked.lower_bound <= chunked.value
    split = partition(array, 3, schedule=zb_h1)
    assert split.array.weight is not None and int(split.array.weight.sum()) == 8
    assert optsched.verify(split.schedule) == []


def test_a_profile_gives_names_and_bytes() -> None:
    """An object with `problem`, `stages` and `standing_bytes`, as measured profiles are."""
    array = JobArray([[1, 5, 1]], [[1, 5, 1]])
    stages = [SimpleNamespace(name=name) for name in ("embed", "block", "head")]
    known = SimpleNamespace(
        problem=lambda: array, stages=stages, standing_bytes=lambda: [50, 10, 10]
    )
    assert partition(known, 2).names in (("block",), ("head",))
    assert partition(known, 2, 55).names == ("block",)
    for bad, sentence in ((3, "layers: "), (array, "stages: ")):
        with pytest.raises(InputError, match=sentence):
            partition(bad, 4)
    with pytest.raises(InputError, match="in_flight: expected 2 numbers"):
        partition(array, 2, in_flight=[1])
