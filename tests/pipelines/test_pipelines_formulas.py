"""Published bubbles and activations: every baseline's schedule equals them exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optsched import Schedule, pipelines, verify
from optsched.analysis.occupancy import peak_memory
from optsched.errors import InputError

SIZES = [(1, 3), (2, 2), (3, 8), (4, 4), (4, 16), (5, 7), (8, 3)]
TIMES = [(4, 4, None), (4, 8, None), (4, 4, 4), (8, 8, 4)]


def built(name: str, stages: int, m: int, times: tuple[int, int, int | None], c: int) -> Schedule:
    """The verified schedule of a uniform job."""
    f, b, w = times
    job = pipelines.uniform(
        name, stages=stages, micro_batches=m, forward=f, backward=b, weight=w, chunks=c
    )
    schedule: Schedule = getattr(pipelines, name)(job)
    assert verify(schedule) == []
    return schedule


def peaks(schedule: Schedule, chunks: int = 1) -> list[Fraction]:
    """Peak activations of every device."""
    return [Fraction(peak_memory(schedule, r), chunks) for r in range(schedule.n_resources)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["vanilla", "gpipe", "one_f_one_b", "interleaved",
                                  "chimera", "zb_h1"])  # fmt: skip
def test_simulated_bubbles_are_the_published_ones(
    name: str, times: tuple[int, int, int | None]
) -> None:
    """Exact fractions, wherever the formula claims to hold."""
    compared = 0
    for stages, m in SIZES:
        for c in (1, 2, 4) if name == "interleaved" else (1,):
            f, b, w = times
            try:
                published = pipelines.bubble(
                    name, stages=stages, micro_batches=m, forward=f, backward=b, weight=w, chunks=c
                )
            except InputError:
                continue
            assert pipelines.idle_share(built(name, stages, m, times, c)) == published
            compared += 1
    assert compared or name in ("chimera", "zb_h1")


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_activations(stages: int, m: int) -> None:
    """The column of the table, device by device."""
    times = (4, 8, None)
    range_ = range(stages)
    assert peaks(built("vanilla", stages, m, times, 1)) == [1] * stages
    assert peaks(built("gpipe", stages, m, times, 1)) == [m] * stages
    assert peaks(built("one_f_one_b", stages, m, times, 1)) == [min(m, stages - s) for s in range_]
    if m % stages == 0:
        for c in (1, 2, 4):
            held = [Fraction(min(c * m, 2 * (stages - s - 1) + (c - 1) * stages + 1), c)
                    for s in range_]  # fmt: skip
            assert peaks(built("interleaved", stages, m, times, c), c) == held


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (4, 4), (4, 16)])
def test_chimera_holds_half_to_all(stages: int, m: int) -> None:
    """S/2 + 1 in the middle or at the ends, never more than S (Chimera, table 2)."""
    held = peaks(built("chimera", stages, m, (4, 4, None), 1))
    assert min(held) >= min(m, stages // 2 + 1)
    assert max(held) <= stages
    assert held == held[::-1]


@pytest.mark.parametrize(("stages", "m"), [(1, 4), (2, 8), (4, 8)])
def test_zero_bubble_activations(stages: int, m: int) -> None:
    """S and 2S - 1 until W; what I frees stays S - s and 2(S - s) - 1 times."""
    for name, most, ahead in (
        ("zb_h1", stages, lambda s: stages - s),
        ("zb_h2", 2 * stages - 1, lambda s: 2 * (stages - s) - 1),
    ):
        build = getattr(pipelines, name)
        job = pipelines.uniform(name, stages=stages, micro_batches=m)
        assert max(peaks(build(job))) == min(m, most)
        job = job.replace(weight_memory=0)
        assert peaks(build(job)) == [min(m, ahead(s)) for s in range(stages)]


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize(("stages", "m"), [(1, 4), (4, 7), (4, 16)])
def test_zb_h2_has_no_bubble_as_a_period_only(
    stages: int, m: int, times: tuple[int, int, int]
) -> None:
    """Period = load + (S-1)(f+b-2w); one iteration alone idles (S-1) max(f, f+b-2w)."""
    f, b, w = times
    job = pipelines.uniform(
        "zb_h2", stages=stages, micro_batches=m, forward=f, backward=b, weight=w
    )
    load = m * (f + b + w)
    assert pipelines.zb_h2(job).makespan == load + (stages - 1) * max(f, f + b - 2 * w)
    schedule = pipelines.zb_h2(job.with_objective("period"))
    assert verify(schedule) == []
    assert schedule.period == load + (stages - 1) * (f + b - 2 * w)
    assert pipelines.idle_share(schedule) == pipelines.bubble(
        "zb_h2", stages=stages, micro_batches=m, forward=f, backward=b, weight=w
    )


@pytest.mark.parametrize(("stages", "waves"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 3), (4, 4)])
def test_hanayo_keeps_its_bound(stages: int, waves: int) -> None:
    """At most (2S-2)/(3wS+S-1) for m = S, b = 2f and up to three waves; a little more with four."""
    chunks = 2 * waves
    schedule = built("hanayo", stages, stages, (chunks, 2 * chunks, None), chunks)
    bound = Fraction(2 * stages - 2, 3 * waves * stages + stages - 1)
    share = pipelines.idle_share(schedule)
    assert share <= bound if waves < 4 else bound < share < Fraction(12, 100)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("hanayo", {}, "only a bound"),
        ("zb_h1", {"micro_batches": 3}, "holds for m >= 4, got m = 3"),
        ("zb_h2", {"weight": None}, "weight: missing"),
        ("chimera", {"stages": 3}, "S even"),
        ("dapple", {}, "name: expected one of"),
    ],
)
def test_no_formula(name: str, sizes: dict[str, int], message: str) -> None:
    """Where nothing exact is published, a sentence says so."""
    with pytest.raises(InputError, match=message):
        pipelines.bubble(name, **{"stages": 4, "micro_batches": 8, "weight": 1} | sizes)
