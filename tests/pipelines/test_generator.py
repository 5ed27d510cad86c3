"""Job arrays from a model and a seed: what the options change, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest

from optsched.errors import InputError
from optsched.pipelines.generator import job_array


def made(**options: object):  # type: ignore[no-untyped-def]
    """Six BERT jobs on four devices."""
    return job_array("bert_large", 4, 6, seed=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"jitter": 0.2}, {"times": (1, 99)}, {"in_flight": True, "recompute": True}]
)
def test_same_seed_same_array(options: dict[str, object]) -> None:
    """And another seed makes another."""
    assert made(**options) == made(**options)
    other = job_array("bert_large", 4, 6, seed=4, **options)  # type: ignore[arg-type]
    assert other != made(**options)


def test_jitter_stays_within_its_share() -> None:
    """Measured times scatter; every block by its own factor."""
    plain, off = made(), made(jitter=0.05)
    for key in ("forward", "backward"):
        ratio = getattr(off, key) / getattr(plain, key)
        assert (abs(ratio - 1) <= 0.0501).all()
        assert len(np.unique(ratio)) > 1
    assert (off.recompute == plain.recompute).all()


def test_random_times_are_in_their_range() -> None:
    """Both ends included; bytes are those of the model."""
    array = made(times=(5, 9))
    for times in (array.forward, array.backward):
        assert times.min() >= 5
        assert times.max() <= 9
    assert not array.lag_forward.any()
    assert not array.update.any()
    assert (array.activation == made().activation).all()


@pytest.mark.parametrize(("recompute", "kept"), [(False, "activation"), (True, "checkpoint")])
def test_in_flight_holds_what_1f1b_needs(recompute: bool, kept: str) -> None:
    """The largest job on every stage, S - v times."""
    array = made(in_flight=True, recompute=recompute)
    assert (array.memory == getattr(array, kept).max(axis=0) * [4, 3, 2, 1]).all()


def test_names_of_options() -> None:
    """A name lists the options that are not the default."""
    assert made().name == "bert_large-6x4-seed3"
    everything = made(times=(1, 99), memory="80 GB", recompute="choose", objective="period")
    assert everything.name == "bert_large-6x4-seed3-80GB-choose-random1:99-period"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": 1.5}, "jitter: expected a share, 0 to 1, got 1.5"),
        ({"times": (9, 1)}, "times: expected 0 <= least <= most"),
        ({"in_flight": True, "memory": "80GB"}, "in_flight: give it or memory, not both"),
        ({"objective": "speed"}, "objective: expected one of makespan, "),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    """One sentence with the field and the value."""
    with pytest.raises(InputError, match=message):
        made(**options)
