"""The learned surrogate: symmetry, absence, training, updates, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from surrogate_cases import (  # noqa: E402
    EPOCHS,
    GB,
    HOSTS,
    SEED,
    measured,
    same_weights,
    small_cluster,
    small_model,
    small_table,
    some_sets,
)

from optsched.bandwidth import metrics, samples, synthetic  # noqa: E402
from optsched.bandwidth.models import surrogate_tokens, surrogate_training  # noqa: E402
from optsched.bandwidth.models.measurements import (  # noqa: E402
    Measurement,
    MeasurementTable,
    MixedMeasurements,
)
from optsched.bandwidth.models.surrogate import HierarchicalTransformer  # noqa: E402
from optsched.bandwidth.models.surrogate_network import SurrogateNetwork  # noqa: E402
from optsched.bandwidth.topology.cluster import Cluster, Host  # noqa: E402
from optsched.testing import check_bandwidth_model  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def cluster() -> Cluster:
    """Four hosts of two types."""
    return small_cluster()


@pytest.fixture
def table() -> MeasurementTable:
    """Some sets with their GPUs."""
    return small_table()


@pytest.fixture
def model() -> HierarchicalTransformer:
    """Trained for a moment."""
    return small_model()


# what is predicted


def test_conformance(model: HierarchicalTransformer) -> None:
    """The suite that every bandwidth model must pass."""
    check_bandwidth_model(model)


def test_one_host_is_the_intra_table(cluster: Cluster, model: HierarchicalTransformer) -> None:
    """Stage one: exactly the value of exactly those GPUs; nothing for less than two."""
    rows = np.zeros((4, cluster.n_gpus), np.bool_)
    rows[1, 9] = True
    rows[2, [8, 9]] = True
    rows[3, [8, 10]] = True
    intra = cluster.type(1).intra
    assert intra is not None
    assert model.predict(rows).tolist() == [0, 0, intra.of(0b11), intra.of(0b101)]
    assert intra.of(0b11) != intra.of(0b101)


def test_predictions_are_positive_integers(
    cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """kB/s, in the order of the rows, also none; the interval is the prediction."""
    rows = some_sets(cluster)
    values = model.predict(rows)
    assert values.dtype == np.int64
    assert (values[rows.sum(axis=1) > 1] > 0).all()
    assert (values < surrogate_tokens.COUNT).all()
    order = np.random.default_rng(0).permutation(len(rows))
    assert np.array_equal(model.predict(rows[order]), values[order])
    assert len(model.predict(rows[:0])) == 0
    low, high = model.interval(rows)
    assert np.array_equal(low, values)
    assert np.array_equal(high, values)
    assert model.tables() is None
    assert not model.intra_monotone


def test_a_prediction_does_not_depend_on_the_others(
    cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """One by one or in a batch, however many there are."""
    rows = some_sets(cluster, 70)
    values = model.predict(rows)
    alone = [int(model.predict(row[None])[0]) for row in rows]
    np.testing.assert_allclose(values, alone, rtol=1e-6)
    several = np.concatenate([model.predict(rows[:33]), model.predict(rows[33:])])
    np.testing.assert_allclose(values, several, rtol=1e-6)


def test_order_of_hosts_is_nothing(cluster: Cluster, model: HierarchicalTransformer) -> None:
    """Hosts of one type change places: the same bits."""
    rows = some_sets(cluster).reshape(-1, 4, 8)
    assert [host.type for host in cluster.hosts] == [*HOSTS, *HOSTS]
    changed = rows[:, [2, 3, 0, 1]]
    values = model.predict(rows.reshape(-1, 32))
    assert np.array_equal(values, model.predict(changed.reshape(-1, 32)))
    assert len(set(values.tolist())) > 20


def test_the_network_itself_knows_no_order() -> None:
    """Not only sorting hides the order: there is no positional encoding."""
    network = SurrogateNetwork(7)
    draw = torch.Generator().manual_seed(0)
    hosts, total = torch.randn(3, 5, 40, generator=draw), torch.randn(40, generator=draw)
    with torch.no_grad():
        one, other = network(hosts, total), network(hosts[:, [3, 0, 4, 1, 2]], total)
        different = network(hosts.flip(0), total)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, different, atol=1e-3)


def test_absent_hosts_take_no_part_in_the_network() -> None:
    """Whatever stands in the place of an absent host; in the encoder and in the pooling."""
    network = SurrogateNetwork(7)
    draw = torch.Generator().manual_seed(0)
    hosts, total = torch.randn(3, 2, 40, generator=draw), torch.randn(40, generator=draw)
    rubbish = 100 * torch.randn(3, 3, 40, generator=draw)
    absent = torch.zeros(5, 40)
    absent[2:] = -torch.inf
    with torch.no_grad():
        padded = torch.cat([hosts, rubbish], 1)
        alone, masked = network(hosts, total), network(padded, total, absent)
        seen = network(padded, total)
    torch.testing.assert_close(alone, masked, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone, seen, atol=1e-3)


def test_hosts_that_nobody_uses_change_nothing(
    cluster: Cluster, table: MeasurementTable, model: HierarchicalTransformer
) -> None:
    """The same training on a larger cluster: the same predictions, to the bit."""
    extra = tuple(Host(f"x{i}", HOSTS[0]) for i in range(3))
    larger = Cluster((*cluster.hosts, *extra), cluster.types)
    other = HierarchicalTransformer.fit(larger, table, seed=SEED, epochs=EPOCHS)
    assert same_weights(model, other)
    rows = some_sets(cluster)
    wide = np.pad(rows, ((0, 0), (0, larger.n_gpus - cluster.n_gpus)))
    assert np.array_equal(model.predict(rows), other.predict(wide))


def test_one_gpu_is_neither_absence_nor_a_slow_host(
    cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """A host with one GPU has a token and a flag of its own."""
    rows = np.zeros((2, cluster.n_gpus), np.bool_)
    rows[:, :4] = True
    rows[:, 8:12] = True
    rows[1, 16] = True
    values = model.predict(rows)
    assert values[0] != values[1]
    tokens = surrogate_tokens.tokens_of(cluster, model.intra, rows)
    hosts, _ = model.scaling.read(tokens)
    assert hosts.shape == (3, 3, 2)
    assert hosts[2].T.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert (hosts[:, 2, 0] == 0).all()
    slow = surrogate_tokens.COUNT * np.array([[2, 1]]) + [[1, 0]]
    hosts, _ = model.scaling.read(slow)
    assert hosts[0, 0, 0] < 0 == hosts[0, 1, 0]  # no limit is not the least bandwidth


# training


def test_same_seed_same_bits_in_any_order(
    cluster: Cluster, table: MeasurementTable, model: HierarchicalTransformer
) -> None:
    """The order of the measurements is nothing; the seed is something."""
    turned = MeasurementTable(table.rows[::-1], table.op, table.payload)
    again = HierarchicalTransformer.fit(cluster, turned, seed=SEED, epochs=EPOCHS)
    assert same_weights(model, again)
    other = HierarchicalTransformer.fit(cluster, table, seed=4, epochs=8)
    assert not same_weights(model, other)


def test_torch_is_left_as_it_was(cluster: Cluster, table: MeasurementTable) -> None:
    """Random generator, number of threads, gradient mode and default type."""
    threads = torch.get_num_threads()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    calm = HierarchicalTransformer.fit(cluster, table, seed=3, epochs=2)
    assert torch.equal(torch.get_rng_state(), before)
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode():
            fitted = HierarchicalTransformer.fit(cluster, table, seed=3, epochs=2)
            fitted.predict(some_sets(cluster))
            fitted.update(table.rows[:3])
            assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(fitted, calm)


def test_validation_shares_no_pattern_with_training(cluster: Cluster) -> None:
    """Whole patterns are kept, also where only the GPUs differ."""
    rows = samples.training_samples(cluster, 200, 2)
    intra = surrogate_tokens.intra_tables(cluster, None, ())
    found = surrogate_tokens.samples_of(cluster, intra, measured(cluster, rows, 0).rows)
    for seed in range(3):
        kept = surrogate_training.validation_rows(found, 0.15, np.random.default_rng(seed))
        patterns = [tuple(row) for row in (found.tokens // surrogate_tokens.COUNT).tolist()]
        held = {pattern for pattern, there in zip(patterns, kept, strict=True) if there}
        learnt = {pattern for pattern, there in zip(patterns, kept, strict=True) if not there}
        assert held
        assert not held & learnt
        assert len(held) == round(0.15 * len(set(patterns)))


def test_the_best_epoch_is_kept(
    cluster: Cluster, table: MeasurementTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that gets worse ends with the weights that it had before."""
    seen: list[dict[str, Any]] = []
    honest = surrogate_training.one_epoch

    def spoilt(network: Any, *rest: Any) -> float:
        loss = honest(network, *rest)
        if len(seen) >= 5:
            with torch.no_grad():
                for p in network.parameters():
                    p.mul_(1.5)
        seen.append(surrogate_training.weights_of(network))
        return loss

    monkeypatch.setattr(surrogate_training, "one_epoch", spoilt)
    monkeypatch.setattr(surrogate_training, "PATIENCE", 6)
    told: list[surrogate_training.Epoch] = []
    found = HierarchicalTransformer.fit(
        cluster, table, seed=3, epochs=300, validation=0.2, on_progress=told.append
    )
    losses = [epoch.validation for epoch in told]
    best = int(np.argmin(losses))
    assert losses[-1] > losses[best]
    assert len(told) == best + 1 + 6 < 300
    assert [epoch.epoch for epoch in told] == list(range(1, len(told) + 1))
    for key, value in found.weights.items():
        assert np.array_equal(value, seen[best][key])
        assert not np.array_equal(value, seen[-1][key])


def test_a_per_cent_within_hosts_is_not_taken_for_a_world(cluster: Cluster) -> None:
    """Measurements on hosts that are all alike: others a little different remain near to them."""
    intra = surrogate_tokens.intra_tables(cluster, None, ())
    gpus = (("n01", (0, 1)), ("n02", (0, 1)))
    alike = surrogate_tokens.samples_of(cluster, intra, [Measurement((2, 2), GB, gpus)])
    token = int(alike.tokens[0, 0])
    alike = alike._replace(tokens=np.array([[token, token]]))
    value = token % surrogate_tokens.COUNT
    near = np.array([[token, token + round(0.02 * value)]])
    hosts, _ = surrogate_tokens.Scaling.of(alike).read(near)
    assert hosts[0, 0, 0] == 0
    assert 0 < hosts[0, 1, 0] < 0.5


def test_censored_measurements_only_push_up(cluster: Cluster) -> None:
    """Seen beside other traffic: no error to be above, one to be below."""
    rows = samples.training_samples(cluster, 12, 4)
    intra = surrogate_tokens.intra_tables(cluster, None, ())
    exact = measured(cluster, rows, 0).rows
    low = [Measurement(row.pattern, row.value, row.gpus, True) for row in exact]
    network = SurrogateNetwork(1)
    losses = []
    for part, factor in ((exact, 1), (low, 1), (low, 1000)):
        found = surrogate_tokens.samples_of(cluster, intra, part)
        scaling = surrogate_tokens.Scaling.of(found)
        shifted = found._replace(values=np.maximum(found.values // factor, 1))
        examples = surrogate_training.Examples.of(shifted, scaling)
        losses.append(surrogate_training.validation_loss(network, examples))
    assert losses[0] > losses[1] > losses[2] == 0


@pytest.mark.slow
def test_it_learns_a_synthetic_network() -> None:
    """Trained on patterns alone, it predicts sets whose hosts differ by some per cent."""
    cluster = synthetic.cluster("nvswitch", 4)
    known = {row.pattern: row.value for row in synthetic.network(cluster)}
    intra = cluster.types[0].intra
    assert intra is not None

    def value(row: Any) -> int:
        counts = row.reshape(4, 8).sum(axis=1)
        return known[tuple(sorted((int(c) for c in counts if c), reverse=True))]

    learn, test = (
        samples.training_samples(cluster, 250, 1), samples.held_out_samples(cluster, 400, 1)
    )  # fmt: skip
    rows = tuple(
        Measurement(tuple(int(c) for c in row.reshape(4, 8).sum(axis=1) if c), value(row))
        for row in learn
    )
    found = HierarchicalTransformer.fit(cluster, MeasurementTable(rows), seed=1, epochs=150)
    true = [value(row) for row in test]
    assert metrics.r_squared(true, found.predict(test)) > 0.9
    assert metrics.mape(true, found.predict(test)) < 0.12


# updates


def test_an_update_without_news_is_the_model(
    cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """Nothing, or runs on one host only."""
    assert model.update([]) is model
    assert model.update([Measurement((4,), 300 * GB)]) is model


@pytest.mark.slow
def test_an_update_moves_towards_the_news(
    cluster: Cluster, table: MeasurementTable, model: HierarchicalTransformer
) -> None:
    """New samples are learnt, the old ones kept, and the old model stays as it is."""
    row = np.zeros((1, cluster.n_gpus), np.bool_)
    row[0, [0, 1, 2, 8, 9, 10, 16, 24]] = True
    before, weights = model.predict(row), {k: v.copy() for k, v in model.weights.items()}
    gpus = (("n01", (0, 1, 2)), ("n02", (0, 1, 2)), ("n03", (0,)), ("n04", (0,)))
    news = [Measurement((3, 3, 1, 1), 2 * int(before[0]), gpus)] * 3
    after = model.update(news)
    assert int(before[0]) * 1.1 < after.predict(row)[0] < int(before[0]) * 3
    assert np.array_equal(model.predict(row), before)
    assert all(np.array_equal(model.weights[k], v) for k, v in weights.items())
    assert len(after.samples.values) == len(model.samples.values) + 3
    assert same_weights(after, model.update(news))


@pytest.mark.slow
def test_the_penalty_holds_what_old_samples_need(
    model: HierarchicalTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand times the penalty: what matters to old samples stays nearer to where it was."""
    gpus = (("n01", (0, 1, 2, 3)), ("n02", (0, 1)))
    news = [Measurement((4, 2), 5 * GB, gpus)]

    network = surrogate_training.network_of(model.weights)
    old = surrogate_training.Examples.of(model.samples, model.scaling)
    stiffness = surrogate_training.fisher(network, old)

    def moved() -> float:
        new = model.update(news).weights
        return sum(
            float((stiffness[k].numpy() * (new[k] - v) ** 2).sum())
            for k, v in model.weights.items()
        )

    free = moved()
    monkeypatch.setattr(surrogate_training, "PENALTY", 2000.0)
    assert 0 < moved() < 0.5 * free


def test_fisher_is_the_mean_squared_gradient(model: HierarchicalTransformer) -> None:
    """Against one backward pass for every sample."""
    network = surrogate_training.network_of(model.weights)
    examples = surrogate_training.Examples.of(model.samples, model.scaling)
    found = surrogate_training.fisher(network, examples)
    slow = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    n = len(model.samples.values)
    for i in range(n):
        one = examples.take(torch.tensor([i]))
        network.zero_grad()
        network(one.hosts, one.total, one.absent).sum().backward()
        for name, p in network.named_parameters():
            assert p.grad is not None
            slow[name] += p.grad**2 / n
    for name, value in slow.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6)


def test_an_update_with_other_payloads_is_refused(model: HierarchicalTransformer) -> None:
    """They rank sets differently."""
    with pytest.raises(MixedMeasurements):
        model.update(MeasurementTable((Measurement((2, 2), GB),), payload=1 << 31))
