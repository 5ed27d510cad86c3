"""A table of measured patterns: what it knows, and what it refuses to guess."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.topology.cluster import Cluster, HostType
from optsched.bandwidth.topology.rates import UNMEASURED
from optsched.errors import InputError

CLUSTER = Cluster.uniform(HostType("h", 4), 3)


def of(*rows: tuple[tuple[int, ...], int]) -> MeasurementTable:
    """A table of patterns and values."""
    return MeasurementTable(tuple(Measurement(pattern, value) for pattern, value in rows))


@given(st.integers(0, 2**20), st.integers(1, 2**12 - 1))
def test_a_complete_table_answers_by_sorted_counts(seed: int, mask: int) -> None:
    """B(S) is the entry of the counts of S, whichever hosts and GPUs; 0 for a single GPU."""
    cluster = synthetic.cluster("nvswitch", 3)
    table = synthetic.network(cluster, seed % 3)
    entries = {row.pattern: row.value for row in table}
    row = np.zeros(cluster.n_gpus, np.bool_)
    for i in range(12):
        row[2 * i] = mask >> i & 1
    counts = [int(row[8 * h : 8 * h + 8].sum()) for h in range(3)]
    pattern = tuple(sorted((c for c in counts if c), reverse=True))
    expected = entries[pattern] if sum(pattern) > 1 else 0
    model = MeasuredBandwidth(cluster, table)
    assert model.of(np.flatnonzero(row)) == expected
    low, high = model.interval(row[None])
    assert low[0] == high[0] == expected


def test_what_was_not_measured_is_not_guessed() -> None:
    """`predict` raises with the pattern; the interval spans 0 to the largest value."""
    model = MeasuredBandwidth(CLUSTER, of(((2, 2), 70), ((4,), 300)))
    with pytest.raises(UnmeasuredPattern, match=r"3\+1 is not measured") as caught:
        model.of([0, 1, 2, 4])
    assert caught.value.pattern == "3+1"
    row = np.zeros((1, 12), np.bool_)
    row[0, [0, 1, 2, 4]] = True
    low, high = model.interval(row)
    assert (low[0], high[0]) == (0, 300)
    tables = model.tables()
    assert tables is not None
    assert tables.network[tables.automaton.state(np.array([3, 1]))] == UNMEASURED
    assert tables.network[tables.automaton.state(np.array([2, 2]))] == 70


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Measurement((5, 1), 1), r"measurements\[0\].pattern: 5\+1 does not fit 3 hosts"),
        (Measurement((1, 1, 1, 1), 1), "does not fit 3 hosts"),
        (Measurement((1, 1), 1, (("n01", (0,)), ("n09", (0,)))), r"gpus: there is no host 'n09'"),
        (Measurement((1, 1), 1, (("n01", (0,)), ("n02", (4,)))), "ids in 0..3 on n02, got 4"),
    ],
)
def test_measurements_of_another_cluster_are_refused(row: Measurement, words: str) -> None:
    """With the position, what is wrong, and what is possible."""
    with pytest.raises(InputError, match=words):
        MeasuredBandwidth(CLUSTER, MeasurementTable((row,)))
