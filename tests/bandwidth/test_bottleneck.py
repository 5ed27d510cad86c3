"""The default model: minimum of network and hosts, learnt from measurements."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bandwidth.metrics import coverage, mape, r_squared
from benchmarks.bandwidth.samples import held_out_samples, training_samples
from optsched.bandwidth import plan_measurements, synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.fallback import best_rings, intra_estimate
from optsched.bandwidth.models.gaussian import LENGTH, NOISE, SIGNAL, GaussianProcess
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.bandwidth.models.patterns import automaton
from optsched.bandwidth.models.prior import LINE, line_rate, near_line_rate
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.links import link_rate
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection

CLUSTER = synthetic.cluster("nvswitch", 4)
MIXED = synthetic.cluster(["nvswitch", "cube_mesh", "nvlink_pairs", "pcie"], 4)
TRUE = MeasuredBandwidth(CLUSTER, synthetic.network(CLUSTER))


def runs(model: MeasuredBandwidth | BottleneckBandwidth, chosen: Selection) -> MeasurementTable:
    """Measure sets of GPUs."""
    cluster = model.cluster
    rows = []
    for row, value in zip(chosen, model.predict(chosen).tolist(), strict=True):
        gpus = tuple(
            (host.name, ids)
            for h, host in enumerate(cluster.hosts)
            if (ids := tuple(np.flatnonzero(row[cluster.first[h] : cluster.first[h + 1]]).tolist()))
        )
        rows.append(Measurement(tuple(len(ids) for _, ids in gpus), value, gpus))
    return MeasurementTable(tuple(rows), "all_reduce", 2 << 30)


def words(model: BottleneckBandwidth) -> list[str]:
    """All that a model predicts, as bytes."""
    found = []
    for which in ("value", "low", "high"):
        tables = model.tables(which)
        assert tables is not None
        found.append(tables.sha256)
    return found


@given(st.integers(0, 2**32 - 1))
def test_without_measurements_it_is_line_rate_and_hosts(mask: int) -> None:
    """The minimum, by hand, for any set of a mixed cluster."""
    model = BottleneckBandwidth(MIXED)
    row = np.array([mask >> i & 1 for i in range(32)], np.bool_)
    counts = [int(row[8 * h : 8 * h + 8].sum()) for h in range(4)]
    pattern = sorted(counts, reverse=True)
    limits = []
    if pattern[1]:
        limits.append(round(float(line_rate(MIXED, np.array([pattern]))[0])))
    for h, count in enumerate(counts):
        table = MIXED.type(h).intra
        assert table is not None
        if count >= 2:
            limits.append(table.of(sum(1 << i for i in range(8) if row[8 * h + i])))
    expected = min(limits) if sum(counts) > 1 else 0
    assert model.of(np.flatnonzero(row)) == expected
    low, high = model.interval(row[None])
    assert low[0] <= expected <= high[0]
    assert len(model.predict(row[None][:0])) == 0
    with pytest.raises(InputError, match="selection: expected booleans"):
        model.predict(row)


@pytest.mark.parametrize("n", [1, 3, 30])
def test_measured_patterns_keep_their_value(n: int) -> None:
    """Exactly, with an interval of no width; all others have one around their value."""
    table = runs(TRUE, training_samples(CLUSTER, n, 1))
    model = BottleneckBandwidth(CLUSTER).fit(table)
    rows = automaton(4, 8).patterns
    rows = rows[rows[:, 1] > 0]
    value, low, high = (model.network(rows, which) for which in ("value", "low", "high"))
    entries = {row.pattern: row.value for row in synthetic.network(CLUSTER)}
    known = model.observations.known
    assert known
    for row, middle, a, b in zip(rows.tolist(), value, low, high, strict=True):
        pattern = tuple(c for c in row if c)
        if pattern in known:
            assert middle == a == b == entries[pattern]
        else:
            assert a <= middle <= b
            assert a < b


def test_update_with_nothing_is_the_identity_and_payloads_do_not_mix() -> None:
    """Models are values."""
    model = BottleneckBandwidth(CLUSTER).fit(runs(TRUE, training_samples(CLUSTER, 9, 2)))
    before = words(model)
    assert model.update([]) is model
    assert words(model.update(model.table.rows[:1])) == before  # a duplicate: the same median
    assert words(model) == before
    with pytest.raises(MixedMeasurements):
        model.update(MeasurementTable(model.table.rows, "all_gather", 2 << 30))


def test_a_run_that_a_host_held_back_is_a_lower_bound() -> None:
    """On the host over PCIe 4 GPUs show their links, not the network; elsewhere it is learnt."""
    slow = MIXED.hosts[3].name
    table = MIXED.type(3).intra
    assert table is not None
    gpus = ((slow, (0, 1, 2, 3)), (MIXED.hosts[0].name, (0, 1, 2, 3)))
    row = Measurement((4, 4), table.of(0b1111), gpus)
    model = BottleneckBandwidth(MIXED).fit(MeasurementTable((row,)))
    assert model.observations.known == {}
    assert model.observations.least == {(4, 4): row.value}
    assert not model.is_measured(np.array([[4, 4]]))[0]
    assert model.network(np.array([[4, 4]]))[0] > row.value
    below = Measurement((4, 4), row.value * 9 // 10, gpus)
    learnt = BottleneckBandwidth(MIXED).fit(MeasurementTable((below,)))
    assert learnt.network(np.array([[4, 4]]))[0] == below.value


def test_where_no_host_allows_more_nothing_is_left_to_measure() -> None:
    """A run at the speed of the best hosts present: the limit above it is not planned for."""
    intra = IntraTable.from_rates(2, {"2": 100.0})
    cluster = Cluster.uniform(HostType("h", 2, nics=2, nic_rate=200.0, intra=intra), 2)
    gpus = (("n01", (0, 1)), ("n02", (0, 1)))
    row = Measurement((2, 2), 99 * KILOBYTES, gpus)
    model = BottleneckBandwidth(cluster).fit(MeasurementTable((row,)))
    assert (2, 2) not in plan_measurements(model, 10).patterns
    assert 99 * KILOBYTES <= model.of([0, 1, 2, 3]) <= 100 * KILOBYTES


def test_it_learns() -> None:
    """250 samples: better than the prior on unseen patterns, intervals hold."""
    chosen, tested = training_samples(CLUSTER, 250, 0), held_out_samples(CLUSTER, 600, 0)
    table = runs(TRUE, chosen)
    model = BottleneckBandwidth(CLUSTER).fit(table)
    model.tables()
    counts = np.sort(np.add.reduceat(tested, CLUSTER.first[:-1], axis=1, dtype=np.int64))[:, ::-1]
    unseen = tested[~model.is_measured(counts)]
    true, prior = TRUE.predict(unseen), BottleneckBandwidth(CLUSTER).predict(unseen)
    assert len(unseen) > 150
    assert mape(true, model.predict(unseen)) < 0.9 * mape(true, prior)
    assert r_squared(true, model.predict(unseen)) > r_squared(true, prior)
    assert 0.85 <= coverage(true, *model.interval(unseen)) <= 1
    assert r_squared(TRUE.predict(tested), model.predict(tested)) > 0.9


def test_the_process_is_the_textbook_formula() -> None:
    """Mean and variance by explicit inverses (Rasmussen & Williams, 2.25 and 2.26)."""
    rng = np.random.default_rng(1)
    x, h, y = rng.uniform(0, 1, (9, 2)), rng.uniform(-1, 1, (9, 1)), rng.normal(size=9)
    process = GaussianProcess(x, h, y)

    def cov(a: int | None, b: int | None, p: np.ndarray, q: np.ndarray) -> float:  # type: ignore[type-arg]
        far = np.sqrt((((p[:2] - q[:2]) / LENGTH) ** 2).sum())
        return float(SIGNAL**2 * np.exp(-far) + p[2] * q[2])

    points = np.column_stack([x, h])
    new = np.array([[0.2, 0.7, 0.4]])
    joint = np.array([[cov(None, None, p, q) for q in points] for p in points])
    inverse = np.linalg.inv(joint + NOISE**2 * np.eye(9))
    across = np.array([cov(None, None, new[0], q) for q in points])
    mean, deviation = process.predict(new[:, :2], new[:, 2:])
    assert mean[0] == pytest.approx(across @ inverse @ y, rel=1e-6)
    variance = cov(None, None, new[0], new[0]) - across @ inverse @ across + NOISE**2
    assert deviation[0] == pytest.approx(np.sqrt(variance) * process.inflation, rel=1e-6)


def test_what_cannot_be_told_apart_stays_in_the_order_of_the_line_rate() -> None:
    """Patterns of one line rate are equal unless they differ by more than they are in doubt."""
    rate = np.array([1.0, 1.0, 2.0, 2.0, 3.0])
    logs = np.array([1.0, 1.1, 2.0, 3.0, 9.0])
    seen = np.array([-0.3, -0.5, -0.4])  # the line rate is off by 0.1 once it is scaled
    sure, unsure = (
        near_line_rate(logs, np.full(5, d), rate, seen, every=True) for d in (1e-6, 1e6)
    )
    assert sure == pytest.approx(logs)
    assert unsure == pytest.approx(rate - 0.4)
    error = (2 * LINE**2 + 0.02) / 4
    half = (logs + rate - 0.4) / 2  # a process as sure as the line rate
    kept = max(0, 1 - error / 0.25**2)
    expected = [(half[0] + half[1]) / 2] * 2 + [2.05 - 0.25 * kept, 2.05 + 0.25 * kept, half[4]]
    found = near_line_rate(logs, np.full(5, error**0.5), rate, seen, every=True)
    assert found == pytest.approx(expected)


def ring_by_hand(kind: HostType, mask: int) -> int:
    """Best weakest link over all cyclic orders."""
    assert kind.links is not None
    first, *rest = [i for i in range(kind.gpus) if mask >> i & 1]
    best = 0
    for order in itertools.permutations(rest):
        ring = (first, *order, first)
        links = [kind.links[a][b] for a, b in itertools.pairwise(ring)]
        best = max(best, min(kilobytes("", link_rate(link)) for link in links))
    return best


@given(st.lists(st.sampled_from(["SYS", "PHB", "PIX", "NV1", "NV2"]), min_size=10, max_size=10))
def test_stand_ins_are_the_best_rings(words_: list[str]) -> None:
    """Against all orders of up to five GPUs."""
    links = [["X"] * 5 for _ in range(5)]
    for (i, k), word in zip(itertools.combinations(range(5), 2), words_, strict=True):
        links[i][k] = links[k][i] = word
    kind = HostType("h", 5, tuple(tuple(row) for row in links))
    values = best_rings(kind)
    for mask in range(32):
        expected = ring_by_hand(kind, mask) if mask.bit_count() > 1 else 0
        assert values[mask] == expected


def test_types_without_a_table_say_so_and_learn_from_runs_on_one_host() -> None:
    """Stand-ins have wide intervals; measured subsets are kept, the others scaled with them."""
    bare = synthetic.host_type("nvlink_pairs")
    kind = HostType("pairs", 8, bare.links, nics=2)
    cluster = Cluster.uniform(kind, 2)
    model = BottleneckBandwidth(cluster)
    assert model.predicted_types == ("pairs",)
    row = np.zeros((1, 16), np.bool_)
    row[0, [0, 1]] = True
    guess = int(best_rings(kind)[3])
    assert model.predict(row)[0] == guess
    low, high = model.interval(row)
    assert low[0] < guess < high[0]
    pair = Measurement((2,), 2 * guess, (("n02", (0, 1)),))
    learnt = model.update([pair])
    low, high = learnt.interval(row)
    assert learnt.predict(row)[0] == low[0] == high[0] == 2 * guess
    values = intra_estimate(cluster, 0, [pair])
    others = [m for m in range(256) if m.bit_count() > 1 and m != 3]
    assert (values[others] == 2 * best_rings(kind)[others]).all()


def test_hosts_without_network_cards_reach_nothing_across() -> None:
    """0, whatever the process thinks."""
    cluster = Cluster.uniform(HostType("h", 2, nics=0), 3)
    model = BottleneckBandwidth(cluster)
    assert model.of([0, 2]) == 0
    assert model.network(np.array([[1, 1]]), "high")[0] == 0


def test_patterns_that_do_not_fit_are_refused() -> None:
    """With the position of the measurement."""
    with pytest.raises(InputError, match=r"measurements\[0\].pattern: 9\+1 does not fit"):
        BottleneckBandwidth(CLUSTER).fit(MeasurementTable((Measurement((9, 1), 1),)))


def test_predictions_do_not_depend_on_their_batch() -> None:
    """Also on clusters with too many patterns to predict all at once."""
    table = synthetic.network(synthetic.cluster("nvswitch", 4))
    model = BottleneckBandwidth(synthetic.cluster("nvswitch", 20)).fit(table)
    rng = np.random.default_rng(1)
    rows = -np.sort(-rng.integers(0, 9, (60, 20)), axis=1)
    single = [int(model.network(row[None])[0]) for row in rows]
    assert model.network(rows).tolist() == single


# the line rate of network cards as a table of the network


def by_hand(kinds: list[HostType], pattern: list[int]) -> float:
    """The formula in exact fractions, a pattern at a time."""
    rates = []
    for count in pattern:
        ways = [Fraction(0)]
        for kind in kinds:
            if kind.gpus >= count:
                share = max(Fraction(1), Fraction(count * kind.nics, kind.gpus))
                ways.append(kind.nic_kilobytes * min(Fraction(kind.nics), share))
        rates.append(max(ways))
    n, m = sum(pattern), len(pattern)
    return float(min(rates) * Fraction(n - 1, n) * Fraction(m, m - 1))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, list[HostType]]:
    """Hosts of up to three types with different cards."""
    kinds = [
        HostType(f"t{i}", draw(st.sampled_from([1, 2, 4, 8])), nics=draw(st.integers(0, 8)),
                 nic_rate=draw(st.sampled_from([12.5, 25.0, 50.0])))
        for i in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    hosts = [Host(f"n{i}", kinds[i % len(kinds)].name) for i in range(4)]
    used = kinds[: len({host.type for host in hosts})]
    return Cluster(tuple(hosts), tuple(kinds)), used


@given(clusters(), st.lists(st.integers(1, 8), min_size=2, max_size=4))
def test_it_is_the_formula(made: tuple[Cluster, list[HostType]], counts: list[int]) -> None:
    """Equal to exact fractions, on clusters of one type and of several."""
    cluster, kinds = made
    most = max(kind.gpus for kind in kinds)
    pattern = sorted((min(c, most) for c in counts), reverse=True)
    row = np.array([[*pattern, *[0] * (4 - len(pattern))]])
    assert line_rate(cluster, row)[0] == pytest.approx(by_hand(kinds, pattern), rel=1e-12)


def test_a_single_host_is_not_limited_and_a_single_gpu_has_nothing() -> None:
    """Infinite within a host; 0 for no GPU and for one."""
    cluster = Cluster.uniform(HostType("h", 8), 2)
    found = line_rate(cluster, np.array([[0, 0], [1, 0], [2, 0], [8, 0]]))
    assert found.tolist() == [0.0, 0.0, np.inf, np.inf]
