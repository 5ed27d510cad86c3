"""The equations of the Entropy paper's micro level, by hand and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError
from optsched.cluster.policies.elastic import score
from optsched.elastic import MicroController
from optsched.elastic.micro import uncertainty

UNIT = st.floats(0.0, 1.0, allow_subnormal=False)
ENTROPIES = st.lists(UNIT, min_size=1, max_size=8)


@given(ENTROPIES, st.floats(0, 0.99), st.integers(1, 4), st.integers(1, 600), st.integers(1, 10**6))
def test_shares(H: list[float], beta: float, passes: int, budget: int, samples: int) -> None:
    """(20)-(25): weights, samples and batches add up within their bounds, or are refused."""
    micro = MicroController(budget, beta=beta, samples=samples)
    if not 8 * len(H) <= budget <= 64 * len(H):
        with pytest.raises(InputError, match=f"not {budget}"):
            micro.step(H)
        return
    equal = MicroController(budget).step([H[0]] * len(H))
    assert equal.weights == pytest.approx(np.full(len(H), 1 / len(H)))
    for _ in range(passes):
        step = micro.step(H)
        assert step.weights.sum() == pytest.approx(1)
        assert (len(H) * step.weights >= 0.5 - 1e-9).all()
        assert (len(H) * step.weights <= 1.5 + 1e-9).all()
        assert step.samples.sum() == samples
        assert (np.abs(step.samples - step.weights * samples) < 1 + 1e-6 * samples).all()
        assert step.batches.sum() == budget
        assert 8 <= step.batches.min() <= step.batches.max() <= 64
        assert step.step_time == pytest.approx(len(H) * step.batches.max() / budget)


def test_by_hand() -> None:
    """(18)-(22): .9 of a mean of .4 is at the bound 1.5; (19), (26): alpha .25, w = (.75, .25).

    Samples and batches follow the same weights, so steps are equal up to bounds.
    """
    H = [0.9, 0.3, 0.2, 0.2]
    step = MicroController(256, (8, 256), samples=100_000, beta=0).step(H)
    assert step.weights[0] == pytest.approx(0.375)
    assert step.weights[1] == pytest.approx(step.weights[2] * 1.5)
    steps = step.samples / step.batches
    assert steps.max() / steps.min() < 1.02
    weights = np.array([0.75, 0.25])
    assert uncertainty(weights, [0.8, 0.2], [0.4, 0.6], 0.25) == pytest.approx(0.5)
    assert uncertainty(weights, [0.8, 0.2]) == pytest.approx(0.65)
    assert uncertainty(np.full(4, 0.25), [0.9] * 4) == pytest.approx(0.9)  # as printed: 1 / R


def test_learning_rate() -> None:
    """(27): the rate grows when U falls, of the first rate and within bounds; gamma < 0 decays."""
    micro = MicroController(rate=1e-3)
    factors = [micro.step([u]).rate_factor for u in (1.0, 0.1, 0.1, 0.0, 1e-9)]
    assert factors == pytest.approx([1, 10**0.5, 10**0.5, 1, 10])
    decay = MicroController(rate=1e-3, gamma=-0.5)
    assert [decay.step([u]).rate_factor for u in (1.0, 0.25)] == pytest.approx([1, 0.5])


def test_score() -> None:
    """(29): lambda weighs level and fall; a rising U counts as no fall."""
    for seen, U, fall in (([], 0.8, 0), ([0.7, 0.9], 0.9, 0), ([1, 0.6], 0.6, 0.4)):
        for lam in (0.0, 0.5, 1.0):
            found = score(np.array(seen, np.float64), 0, len(seen), 0.8, lam)
            assert found == pytest.approx(lam * U + (1 - lam) * fall)


def test_controller_over_several_passes() -> None:
    """U_0, a refused step, and equal weights when workers change."""
    micro = MicroController(samples=1000)
    first = micro.step([0.9, 0.3, 0.2, 0.2], Q=[0.5] * 4)
    assert first.uncertainty == pytest.approx(0.4)
    assert first.rate_factor == 1
    with pytest.raises(InputError, match="9 workers"):  # and nothing is remembered of it
        micro.step([0.5] * 4, workers=9)
    second = micro.step([0.4, 0.2, 0.2, 0.2])
    assert second.uncertainty == pytest.approx(float(first.weights @ [0.4, 0.2, 0.2, 0.2]))
    assert second.rate_factor == pytest.approx((second.uncertainty / 0.4) ** -0.5)
    changed = micro.step([0.3, 0.3, 0.2, 0.2], workers=2)
    assert changed.samples.tolist() == [500, 500]
    assert changed.batches.tolist() == [32, 32]
    assert micro.step([0.2, 0.1]).uncertainty == pytest.approx(0.15)


WRONG = [
    (lambda: MicroController(budget=0), "budget"),
    (lambda: MicroController(batch_bounds=(9, 8)), "batch bounds"),
    (lambda: MicroController(gamma=float("nan")), "gamma"),
    (lambda: MicroController(alpha=0.5).step([0.5]), "Q: margin uncertainties are needed"),
    (lambda: MicroController().step([1.5]), "H: expected 0..1, value 0 is 1.5"),
    (lambda: MicroController().step([0.5, float("nan")]), "finite"),
    (lambda: MicroController(density=0), "density"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_hostile_input(call: object, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        call()  # type: ignore[operator]
