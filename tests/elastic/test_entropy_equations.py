"""The Entropy paper's equations: our resolution keeps its promises, the printed ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, elastic
from optsched.cluster.policies.elastic import score
from optsched.elastic import equations as eq

UNIT = st.floats(0.0, 1.0, allow_subnormal=False)
ENTROPIES = st.lists(UNIT, min_size=1, max_size=8)


def after(H: list[float], beta: float = eq.BETA, as_printed: bool = False) -> np.ndarray:
    """Weights after one pass from equal ones, as we resolve (18)-(22) or as they are printed."""
    relative = eq.relative_uncertainty(H, as_printed=as_printed)
    return eq.smoothed_weights(np.full(len(H), 1 / len(H)), relative, beta, as_printed=as_printed)


@pytest.mark.parametrize(("workers", "percent"), [(3, 57), (4, 90), (8, 100)])
def test_printed_weights_are_uniform(workers: int, percent: int) -> None:
    """(18)-(22) P: of 2000 random H in [.05, .95] so many end exactly uniform; ours hardly ever."""
    drawn = np.random.default_rng(0).uniform(0.05, 0.95, (2000, workers))
    uniform = [bool((w == w[0]).all()) for w in (after(h.tolist(), as_printed=True) for h in drawn)]
    assert 100 * np.mean(uniform) == pytest.approx(percent, abs=2.5)
    assert not any((w == w[0]).all() for w in (after(h.tolist()) for h in drawn))


def test_printed_weights_by_hand() -> None:
    """(18)-(22) P: three times as uncertain is .27 instead of .24, ours .375; out of bounds too."""
    assert after([0.9, 0.3, 0.2, 0.2], beta=0, as_printed=True) == pytest.approx(
        [0.27, 0.24, 0.24, 0.24], abs=0.005
    )
    ours = after([0.9, 0.3, 0.2, 0.2], beta=0)
    assert ours[0] == pytest.approx(0.375)
    assert ours[1] == pytest.approx(ours[2] * 1.5)
    u = np.array([1.5, 0.5, 0.5, 0.5])
    w = eq.smoothed_weights(np.full(4, 0.25), u, 0, as_printed=True)
    assert 4 * w[0] > 1.5
    assert 4 * eq.smoothed_weights(np.full(4, 0.25), u, 0).max() <= 1.5 + 1e-12


@given(ENTROPIES, st.floats(0, 0.99), st.integers(1, 4))
def test_weights_keep_bounds_and_sum(H: list[float], beta: float, passes: int) -> None:
    """(20)-(22): weights add up to 1 and keep the bounds; equal entropies give equal weights."""
    w = np.full(len(H), 1 / len(H))
    assert after([H[0]] * len(H)) == pytest.approx(w)
    for _ in range(passes):
        w = eq.smoothed_weights(w, eq.relative_uncertainty(H), beta)
        assert w.sum() == pytest.approx(1)
        assert (len(H) * w >= 0.5 - 1e-9).all()
        assert (len(H) * w <= 1.5 + 1e-9).all()


def test_printed_counts_leave_a_negative_rest() -> None:
    """(23), (24): rounding can hand out more than there is; floor and largest rest never do."""
    w = np.array([0.375, 0.375, 0.25])
    assert 4 - eq.sample_counts(w, 4, as_printed=True).sum() == -1
    assert eq.sample_counts(w, 4).tolist() == [2, 1, 1]


@given(ENTROPIES, st.integers(0, 10**6))
def test_counts_add_up(H: list[float], samples: int) -> None:
    """(23), (24): all samples are given out, each worker within one of its share."""
    w = after(H)
    counts = eq.sample_counts(w, samples)
    assert counts.sum() == samples
    assert (np.abs(counts - w * samples) < 1 + 1e-6 * samples).all()


@pytest.mark.parametrize("budget", [32, 64, 200])
def test_printed_batches_ignore_the_budget(budget: int) -> None:
    """(25) P against (7): four equal workers get 22 each, 88 in all, whatever B is."""
    w = np.full(4, 0.25)
    assert eq.batch_sizes(w, budget, as_printed=True).tolist() == [22] * 4
    assert eq.batch_sizes(w, budget).tolist() == [budget // 4] * 4


@given(ENTROPIES, st.integers(1, 600))
def test_batches_add_up(H: list[float], budget: int) -> None:
    """(25): the global batch is kept within the bounds, or the impossible is refused."""
    w = after(H)
    if not 8 * len(H) <= budget <= 64 * len(H):
        with pytest.raises(InputError, match=f"not {budget}"):
            eq.batch_sizes(w, budget)
        return
    b = eq.batch_sizes(w, budget)
    assert b.sum() == budget
    assert b.min() >= 8
    assert b.max() <= 64
    assert eq.step_time(b) >= 1


def test_printed_uncertainty_depends_on_workers_only() -> None:
    """(26) P: 1/R at equal entropies, for .1 and .9 alike; ours is the entropy, whatever R is."""
    for workers in (1, 2, 4, 8):
        w = np.full(workers, 1 / workers)
        for h in (0.1, 0.9):
            assert eq.uncertainty(w, [h] * workers, as_printed=True) == pytest.approx(1 / workers)
            assert eq.uncertainty(w, [h] * workers) == pytest.approx(h)


@given(st.integers(1, 8), UNIT, st.booleans(), st.integers(0, 2**32))
def test_uncertainty_is_the_weighted_sum_of_u(
    workers: int, alpha: float, printed: bool, seed: int
) -> None:
    """(26), term by term: w_r u_r with u of (19); printed u are of the shares of (18)."""
    random = np.random.default_rng(seed)
    H, Q = random.uniform(0, 1, (2, workers)).tolist()
    w = random.dirichlet(np.ones(workers)).tolist()
    expected = 0.0
    for r in range(workers):
        h, q = (H[r] / sum(H), Q[r] / sum(Q)) if printed else (H[r], Q[r])
        expected += w[r] * (alpha * h + (1 - alpha) * q)
    found = eq.uncertainty(w, H, Q, alpha, as_printed=printed)
    assert found == pytest.approx(expected) and 0 <= found <= 1
    assert eq.uncertainty(w, H) == pytest.approx(eq.uncertainty(w, H, Q, 1.0))
    micro = elastic.MicroController(8 * workers, alpha=alpha, as_printed=printed)
    step, equal = micro.step(H, Q), [1 / workers] * workers
    weights = step.weights if printed else equal
    assert step.uncertainty == pytest.approx(
        eq.uncertainty(weights, H, Q, alpha, as_printed=printed)
    )


def test_uncertainty_by_hand() -> None:
    """(19), (26): alpha .25, H = (.8, .2), Q = (.4, .6), w = (.75, .25)."""
    given = ([0.75, 0.25], [0.8, 0.2], [0.4, 0.6], 0.25)
    assert eq.uncertainty(*given) == pytest.approx(0.75 * 0.5 + 0.25 * 0.5)
    # printed: H / sum H = (.8, .2), Q / sum Q = (.4, .6)
    assert eq.uncertainty(*given, as_printed=True) == pytest.approx(0.5)
    other = ([0.5, 0.5], [0.9, 0.3], [0.2, 0.2], 0.5)
    assert eq.uncertainty(*other) == pytest.approx(0.4)
    assert eq.uncertainty(*other, as_printed=True) == pytest.approx(0.5 * 0.625 + 0.5 * 0.375)


def test_samples_of_a_pass_follow_the_quota() -> None:
    """(12): N = g rho; the micro level shares it, whatever the training data are."""
    assert [eq.pass_samples(g, 250.5) for g in (1, 2, 4)] == [250, 501, 1002]
    micro = elastic.MicroController(64, samples=9_999, density=300)
    assert micro.step([0.9, 0.3], workers=2).samples.sum() == 600
    assert micro.step([0.9, 0.3], workers=4).samples.tolist() == [300] * 4
    assert micro.step([0.5] * 4, workers=1).samples.tolist() == [300]
    plain = elastic.MicroController(64, samples=9_999)
    assert plain.step([0.9, 0.3], workers=4).samples.sum() == 9_999


def test_printed_rate_compounds_with_the_wrong_sign() -> None:
    """(27) P: at a constant U below U_0 the rate falls to its floor; ours grows once, 3.2 times."""
    first = rate = eq.learning_rate(1e-3, 0.1, 1.0, as_printed=True)
    for _ in range(50):
        rate = eq.learning_rate(rate, 0.1, 1.0, as_printed=True)
    assert (first, rate) == (pytest.approx(1e-3 * 0.1**0.5), 1e-5)
    assert eq.learning_rate(1e-3, 0.1, 1.0) / 1e-3 == pytest.approx(3.16, abs=0.01)
    # the text: reduce the rate when U rises
    assert (
        eq.learning_rate(1e-3, 2.0, 1.0) < 1e-3 < eq.learning_rate(1e-3, 2.0, 1.0, as_printed=True)
    )
    assert eq.learning_rate(1e-3, 0.1, 1.0, gamma=-0.5) < 1e-3
    assert eq.learning_rate(1e-3, 0.0, 1.0) == eq.learning_rate(1e-3, 0.5, 0.0) == 1e-3
    assert eq.learning_rate(1e-3, 1e-300, 1.0, gamma=9) == 1e-2


def test_score() -> None:
    """(29): lambda weighs level and fall; a rising U counts as no fall."""
    for seen, U, fall in (
        ([], 0.8, 0),
        ([0.7], 0.7, 0),
        ([0.7, 0.9], 0.9, 0),
        ([1, 0.6], 0.6, 0.4),
    ):
        for lam in (0.0, 0.5, 1.0):
            found = score(np.array(seen, np.float64), 0.8, lam)
            assert found == pytest.approx(lam * U + (1 - lam) * fall)


def test_controller_over_several_passes() -> None:
    """Smoothing, U_0, falls, a refused step, and equal weights when workers change."""
    micro = elastic.MicroController(samples=1000)
    first = micro.step([0.9, 0.3, 0.2, 0.2], Q=[0.5] * 4)
    assert first.uncertainty == pytest.approx(0.4)
    assert (first.improvement, first.rate_factor) == (0, 1)
    assert first.weights == pytest.approx(after([0.9, 0.3, 0.2, 0.2]))
    with pytest.raises(InputError, match="9 workers"):  # and nothing is remembered of it
        micro.step([0.5] * 4, workers=9)
    second = micro.step([0.4, 0.2, 0.2, 0.2])
    assert second.uncertainty == pytest.approx(float(first.weights @ [0.4, 0.2, 0.2, 0.2]))
    assert second.improvement == pytest.approx(first.uncertainty - second.uncertainty)
    assert second.rate_factor == pytest.approx((second.uncertainty / 0.4) ** -0.5)
    assert second.step_time == pytest.approx(4 * second.batches.max() / 64)
    changed = micro.step([0.3, 0.3, 0.2, 0.2], workers=2)
    assert changed.samples.tolist() == [500, 500]
    assert changed.batches.tolist() == [32, 32]
    last = micro.step([0.2, 0.1])
    assert last.improvement == 0
    assert last.uncertainty == pytest.approx(0.15)


def test_printed_controller_follows_algorithm_1() -> None:
    """Lines 11 and 12: weights first, then U with the new ones; beta is that of Table 3."""
    assert eq.BETA == 0.3 and elastic.MicroController(as_printed=True).beta == 0.3
    micro = elastic.MicroController(budget=256, as_printed=True)
    weights = np.full(4, 0.25)
    for H in ([0.9, 0.3, 0.2, 0.2], [0.4, 0.5, 0.2, 0.1]):
        u = eq.relative_uncertainty(H, as_printed=True)
        weights = eq.smoothed_weights(weights, u, 0.3, as_printed=True)
        step = micro.step(H)
        assert step.weights == pytest.approx(weights)
        assert step.uncertainty == pytest.approx(float(weights @ u))
    # who leaves after the pass has taken part in it
    H = [0.7, 0.1, 0.1, 0.1]
    weights = eq.smoothed_weights(weights, H, 0.3, as_printed=True)
    assert micro.step(H, workers=2).uncertainty == pytest.approx(float(weights @ H))


def test_equal_step_counts() -> None:
    """Samples and batches follow the same weights, so steps are equal; printed ones are not."""
    H = [0.9, 0.3, 0.2, 0.2]
    ours = elastic.MicroController(256, (8, 256), samples=100_000, beta=0).step(H)
    steps = ours.samples / ours.batches
    assert steps.max() / steps.min() < 1.02
    capped = elastic.MicroController(256, (8, 64), samples=100_000, beta=0).step(H)
    assert capped.batches.tolist() == [64] * 4  # all at their bound: the weights are lost
    shown = elastic.MicroController(256, samples=100_000, beta=0, as_printed=True).step(
        [1, 0, 0, 0]
    )
    steps = shown.samples / shown.batches
    assert steps.max() / steps.min() > 1.25
    assert shown.batches.sum() != 256


WRONG = [
    (lambda: elastic.MicroController(budget=0), "budget"),
    (lambda: elastic.MicroController(batch_bounds=(9, 8)), "batch bounds"),
    (lambda: elastic.MicroController(batch_bounds=8), "batch bounds"),
    (lambda: elastic.MicroController(alpha=1.1), "alpha"),
    (lambda: elastic.MicroController(beta=1.0), "beta"),
    (lambda: elastic.MicroController(gamma=float("nan")), "gamma"),
    (lambda: elastic.MicroController(rate=-1), "rate"),
    (lambda: elastic.MicroController(rate_bounds=(1, 0)), "rate bounds"),
    (lambda: elastic.MicroController(weight_bounds=(1.1, 2)), "weight bounds"),
    (lambda: elastic.MicroController(samples=-1), "samples"),
    (lambda: elastic.MicroController(alpha=0.5).step([0.5]), "Q"),
    (lambda: elastic.MicroController().step([1.5]), "H: expected 0..1, value 0 is 1.5"),
    (lambda: elastic.MicroController().step([0.5, float("nan")]), "finite"),
    (lambda: elastic.MicroController().step([]), "H"),
    (lambda: elastic.MicroController().step([0.5], Q=[0.5, 0.5]), "Q"),
    (lambda: elastic.MicroController().step([0.5], workers=0), "workers"),
    (lambda: eq.uncertainty([1.0], [0.5, 0.5]), "weights"),
    (lambda: eq.uncertainty([1.0], [0.5], alpha=0.5), "Q: margin uncertainties are needed"),
    (lambda: eq.pass_samples(0, 5), "gpus"),
    (lambda: eq.pass_samples(2, 0.25), "2 GPUs share 0 samples"),
    (lambda: elastic.MicroController(density=0), "density"),
    (lambda: eq.sample_counts([0.9, 0.9], 100), "weights: .* add up to 1, got 1.8"),
    (lambda: eq.sample_counts([1.5, -0.5], 100, as_printed=True), "weights: .* value 1 is -0.5"),
    (lambda: eq.learning_rate(1e-3, -1.0, 1.0), "U"),
    (lambda: eq.step_time([0, 0]), "batches"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_hostile_input(call: object, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        call()  # type: ignore[operator]
