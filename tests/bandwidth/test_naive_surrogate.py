"""The ablation of the learned surrogate, a network over the bits of a set."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from optsched.bandwidth import synthetic  # noqa: E402
from optsched.bandwidth.measurements import Measurement, MeasurementTable  # noqa: E402
from optsched.bandwidth.metrics import r_squared  # noqa: E402
from optsched.bandwidth.naive_surrogate import NaiveSurrogate  # noqa: E402
from optsched.errors import InputError  # noqa: E402

pytestmark = pytest.mark.torch

CLUSTER = synthetic.cluster("nvswitch", 2)
GB = 1_000_000


def rows(n: int) -> tuple[Measurement, ...]:
    """Distinct sets on two hosts, the more GPUs the faster."""
    draw = np.random.default_rng(4)
    found = []
    for a, b in draw.integers(1, 8, (n, 2)).tolist():
        ids = [tuple(sorted(draw.permutation(8)[:c].tolist())) for c in (a, b)]
        found.append(
            Measurement((a, b), (20 + 10 * (a + b)) * GB, (("n01", ids[0]), ("n02", ids[1])))
        )
    return tuple(found)


def chosen(measured: tuple[Measurement, ...]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """The sets as rows of bits."""
    bits = np.zeros((len(measured), 16), np.bool_)
    for i, row in enumerate(measured):
        for h, (_, ids) in enumerate(row.gpus):
            bits[i, 8 * h + np.array(ids)] = True
    return bits


def test_it_learns_what_bits_can_tell() -> None:
    """Sets that it has not seen; integers, and nothing for less than two GPUs."""
    measured = rows(160)
    learn, test = measured[:120], measured[120:]
    model = NaiveSurrogate.fit(CLUSTER, MeasurementTable(learn, payload=7), epochs=60)
    values = model.predict(chosen(test))
    assert values.dtype == np.int64
    assert r_squared([row.value for row in test], values) > 0.8
    few = np.zeros((2, 16), np.bool_)
    few[1, 3] = True
    assert model.predict(few).tolist() == [0, 0]
    assert len(model.predict(few[:0])) == 0
    assert (model.payload, model.intra_monotone, model.tables()) == (7, False, None)


def test_same_seed_same_bits_and_torch_as_it_was() -> None:
    """In any order of the measurements."""
    before = torch.get_rng_state()
    measured = rows(30)
    bits = chosen(measured)
    one = NaiveSurrogate.fit(CLUSTER, MeasurementTable(measured), seed=2, epochs=3)
    other = NaiveSurrogate.fit(CLUSTER, MeasurementTable(measured[::-1]), seed=2, epochs=3)
    third = NaiveSurrogate.fit(CLUSTER, MeasurementTable(measured), seed=3, epochs=3)
    assert np.array_equal(one.predict(bits), other.predict(bits))
    assert not np.array_equal(one.predict(bits), third.predict(bits))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ((), "at least one"),
        ((Measurement((2, 1), GB),), "the GPUs that were measured"),
        ((Measurement((1, 1), 0, (("n01", (0,)), ("n02", (0,)))),), "more than 0"),
        ((Measurement((1, 1), GB, (("n01", (0,)), ("n09", (0,)))),), "no host"),
        ((Measurement((1, 1), GB, (("n01", (0,)), ("n01", (1,)))),), "given twice"),
    ],
)
def test_wrong_measurements(measured: tuple[Measurement, ...], message: str) -> None:
    """Refused before any training."""
    with pytest.raises(InputError, match=message):
        NaiveSurrogate.fit(CLUSTER, MeasurementTable(measured), epochs=1)
