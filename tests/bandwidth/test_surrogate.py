"""The learned surrogate: symmetry, absence, training, and what it leaves alone."""

from __future__ import annotations

import pickle
import sys
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.bandwidth import metrics  # noqa: E402
from benchmarks.bandwidth.samples import held_out_samples, training_samples  # noqa: E402
from optsched.bandwidth import synthetic  # noqa: E402
from optsched.bandwidth.models import surrogate_tokens  # noqa: E402
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable  # noqa: E402
from optsched.bandwidth.models.surrogate import HierarchicalTransformer  # noqa: E402
from optsched.bandwidth.models.surrogate_network import SurrogateNetwork, undisturbed  # noqa: E402
from optsched.errors import InputError, MissingExtra  # noqa: E402

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection

pytestmark = pytest.mark.torch

GB = 1_000_000
HOSTS = ("nvswitch", "nvlink_pairs")
SEED, EPOCHS = 3, 8
CLUSTER = synthetic.cluster(HOSTS, 4)
"""Two types, whose subsets differ in bandwidth."""
TYPES = tuple(kind.intra for kind in CLUSTER.types if kind.intra is not None)


def measured(selection: Selection, seed: int) -> MeasurementTable:
    """Made-up bandwidths of sets: they depend on counts and on the weakest host."""
    draw = np.random.default_rng(seed)
    rows = []
    for row in selection:
        gpus, limit = [], 10**9
        for h, host in enumerate(CLUSTER.hosts):
            ids = tuple(np.flatnonzero(row[8 * h : 8 * h + 8]).tolist())
            if ids:
                gpus.append((host.name, ids))
            if len(ids) > 1:
                limit = min(limit, TYPES[h % 2].of(sum(1 << i for i in ids)))
        pattern = tuple(len(ids) for _, ids in gpus)
        value = round(min(40 * GB * min(pattern), limit) * draw.uniform(0.98, 1.02))
        rows.append(Measurement(pattern, value, tuple(gpus)))
    return MeasurementTable(tuple(rows), payload=1 << 24)


TABLE = measured(training_samples(CLUSTER, 24, 1), 3)


@cache
def trained() -> HierarchicalTransformer:
    """For a moment; models are values, so that all tests may share it."""
    return HierarchicalTransformer.fit(CLUSTER, TABLE, seed=SEED, epochs=EPOCHS)


def some_sets(n: int = 60, seed: int = 5) -> Selection:
    """Sets of all sizes, on one host too."""
    draw = np.random.default_rng(seed)
    rows = draw.random((n, CLUSTER.n_gpus)) < draw.uniform(0, 1, (n, 1))
    for row in rows[::3]:
        row[CLUSTER.host_of != draw.integers(CLUSTER.n_hosts)] = False
    return rows


def same_weights(a: HierarchicalTransformer, b: HierarchicalTransformer) -> bool:
    """Whether all bits are equal."""
    return a.weights.keys() == b.weights.keys() and all(
        np.array_equal(a.weights[key], b.weights[key]) for key in a.weights
    )


# what is predicted


def test_predictions_do_not_depend_on_others_nor_on_the_order_of_hosts() -> None:
    """One by one or in a batch; hosts of one type change places; positive numbers."""
    model, rows = trained(), some_sets(70)
    values = model.predict(rows)
    assert values.dtype == np.int64
    assert (values[rows.sum(axis=1) > 1] > 0).all()
    assert len(set(values.tolist())) > 20
    alone = [int(model.predict(row[None])[0]) for row in rows]
    np.testing.assert_allclose(values, alone, rtol=1e-6)
    order = np.random.default_rng(0).permutation(len(rows))
    assert np.array_equal(model.predict(rows[order]), values[order])
    assert len(model.predict(rows[:0])) == 0
    changed = rows.reshape(-1, 4, 8)[:, [2, 3, 0, 1]].reshape(-1, 32)
    assert np.array_equal(values, model.predict(changed))
    assert all(np.array_equal(end, values) for end in model.interval(rows))
    assert model.tables() is None
    assert not model.intra_monotone


def test_the_network_knows_no_order_and_no_absent_hosts() -> None:
    """No positional encoding; rubbish in absent places enters neither encoder nor pooling."""
    with undisturbed(7):
        network = SurrogateNetwork().eval()
        hosts, total = torch.randn(40, 5, 3), torch.randn(40)
        rubbish = 100 * torch.randn(40, 3, 3)
    there = torch.ones(40, 8, dtype=torch.bool)
    few = there.clone()
    few[:, 5:] = False
    padded = torch.cat([hosts, rubbish], 1)
    with torch.no_grad():
        one = network(hosts, total, there[:, :5])
        other = network(hosts[:, [3, 0, 4, 1, 2]], total, there[:, :5])
        different = network(hosts.flip(2), total, there[:, :5])
        masked, seen = network(padded, total, few), network(padded, total, there)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one, masked, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, different, atol=1e-3)
    assert not torch.allclose(one, seen, atol=1e-3)


def test_one_gpu_is_neither_absence_nor_a_slow_host() -> None:
    """A host with one GPU has a token and a flag of its own."""
    rows = np.zeros((2, CLUSTER.n_gpus), np.bool_)
    rows[:, :4] = rows[:, 8:12] = True
    rows[1, 16] = True
    model = trained()
    assert len(set(model.predict(rows).tolist())) == 2
    hosts, _ = model.scaling.read(surrogate_tokens.tokens_of(CLUSTER, model.intra, rows))
    assert hosts[..., 2].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert (hosts[0, 2] == 0).all()
    slow = surrogate_tokens.COUNT * np.array([[2, 1]]) + [[1, 0]]
    hosts, _ = model.scaling.read(slow)
    assert hosts[0, 0, 0] < 0 == hosts[0, 1, 0]  # no limit is not the least bandwidth


# training


def test_torch_is_left_as_it_was() -> None:
    """Random generator, number of threads, gradient mode, default device and type."""
    threads = torch.get_num_threads()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    calm = HierarchicalTransformer.fit(CLUSTER, TABLE, seed=3, epochs=2)
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.device("meta"):
            fitted = HierarchicalTransformer.fit(CLUSTER, TABLE, seed=3, epochs=2)
            fitted.predict(some_sets())
            assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(fitted, calm)


def test_censored_measurements_only_push_up() -> None:
    """Runs beside other traffic, far below what is known: they lower nothing, exact ones do."""
    low = [Measurement(row.pattern, row.value // 50, row.gpus, True) for row in TABLE]
    exact = [Measurement(row.pattern, row.value, row.gpus) for row in low]
    rows = some_sets()
    plain, pushed, lowered = (
        HierarchicalTransformer.fit(
            CLUSTER, MeasurementTable((*TABLE, *more)), seed=SEED, epochs=40
        ).predict(rows)
        for more in ((), low, exact)
    )
    across = plain != np.minimum(plain, lowered)
    assert across.mean() > 0.5
    assert np.median(pushed[across] / plain[across]) > 0.8
    assert np.median(lowered[across] / plain[across]) < 0.5


@pytest.mark.slow
def test_it_learns_a_synthetic_network() -> None:
    """Trained on patterns alone, it predicts sets whose hosts differ by some per cent."""
    cluster = synthetic.cluster("nvswitch", 4)
    known = {row.pattern: row.value for row in synthetic.network(cluster)}

    def patterns(rows: Selection) -> list[tuple[int, ...]]:
        counts = -np.sort(-rows.reshape(-1, 4, 8).sum(axis=2))
        return [tuple(c for c in row if c) for row in counts.tolist()]

    runs = patterns(training_samples(cluster, 250, 1))
    table = MeasurementTable(tuple(Measurement(p, known[p]) for p in runs))
    test = held_out_samples(cluster, 400, 1)
    found = HierarchicalTransformer.fit(cluster, table, seed=1, epochs=150).predict(test)
    true = [known[p] for p in patterns(test)]
    assert metrics.r_squared(true, found) > 0.9
    assert metrics.mape(true, found) < 0.12


def test_pickled_bits() -> None:
    """The same predictions."""
    model = trained()
    loaded = pickle.loads(pickle.dumps(model))
    assert same_weights(loaded, model)
    assert np.array_equal(loaded.predict(some_sets()), model.predict(some_sets()))


# hostile input


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one measurement across hosts"),
        ([Measurement((4,), GB)], "at least one measurement across hosts"),
        ([Measurement((9, 1), GB)], r"measurements\[0\].pattern"),
        ([Measurement((2, 2), 0)], r"measurements\[0\].value"),
        ([Measurement((2, 2), GB)], "say which GPUs"),
        ([Measurement((1, 1), GB, (("n01", (0,)), ("n01", (1,))))], "given twice"),
        ([Measurement((2, 1), GB, (("n01", (0, 0)), ("n02", (1,))))], "given twice"),
        ([Measurement((1, 1), GB, (("n01", (0,)), ("n09", (1,))))], "no host"),
        ([Measurement((1, 1), GB, (("n01", (0,)), ("n02", (8,))))], "ids in 0..7"),
    ],
)
def test_wrong_measurements(rows: list[Measurement], message: str) -> None:
    """Refused before any training."""
    with pytest.raises(InputError, match=message):
        HierarchicalTransformer.fit(CLUSTER, MeasurementTable(tuple(rows)), epochs=1)


def test_wrong_arguments() -> None:
    """Each with its field."""
    with pytest.raises(InputError, match="seed"):
        HierarchicalTransformer.fit(CLUSTER, TABLE, seed=-1)
    with pytest.raises(InputError, match="epochs"):
        HierarchicalTransformer.fit(CLUSTER, TABLE, epochs=0)
    for wrong in (np.zeros((1, 31), np.bool_), np.zeros((1, 32), np.int64)):
        with pytest.raises(InputError, match="selection"):
            trained().predict(wrong)


def test_without_torch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And importing the model does not import torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"\.\[torch\]"):
        HierarchicalTransformer.fit(CLUSTER, TABLE)


# the naive variant


def test_the_naive_variant_sees_gpus_only() -> None:
    """Same tables within a host; across hosts a token for every GPU, and GPUs needed."""
    model = HierarchicalTransformer.fit(CLUSTER, TABLE, seed=SEED, epochs=2, variant="naive")
    rows = some_sets()
    hosts = np.add.reduceat(rows, CLUSTER.first[:-1], axis=1, dtype=np.int64) > 0
    one = hosts.sum(axis=1) < 2
    assert np.array_equal(model.predict(rows)[one], trained().predict(rows)[one])
    tokens = surrogate_tokens.gpu_tokens_of(rows)
    for row, found in zip(rows, tokens, strict=True):
        assert sorted(found[found > 0] - 1) == np.flatnonzero(row).tolist()
    twins = np.zeros((2, CLUSTER.n_gpus), np.bool_)  # the same counts on hosts of the same types
    twins[0, [0, 8]] = twins[1, [16, 24]] = True
    assert len(set(trained().predict(twins).tolist())) == 1
    assert len(set(model.predict(twins).tolist())) == 2
    bare = MeasurementTable((Measurement((2, 2), GB),))
    with pytest.raises(InputError, match="the measured GPUs"):
        HierarchicalTransformer.fit(CLUSTER, bare, variant="naive")
    with pytest.raises(InputError, match="variant"):
        HierarchicalTransformer.fit(CLUSTER, TABLE, variant="flat")
