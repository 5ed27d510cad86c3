"""The learned surrogate: its files, and input that is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from surrogate_cases import (  # noqa: E402
    GB,
    N,
    same_weights,
    small_cluster,
    small_model,
    small_table,
    some_sets,
)

from optsched.bandwidth import synthetic  # noqa: E402
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable  # noqa: E402
from optsched.bandwidth.models.surrogate import HierarchicalTransformer  # noqa: E402
from optsched.bandwidth.topology.cluster import Cluster, HostType  # noqa: E402
from optsched.bandwidth.topology.intra import IntraTable  # noqa: E402
from optsched.errors import InputError, MissingExtra  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

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


# files


def test_saved_and_loaded_bits(
    tmp_path: Path, cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """The same predictions; it can go on learning; saving again gives the same files."""
    path = tmp_path / "model.json"
    model.save(path)
    loaded = HierarchicalTransformer.load(path, cluster)
    assert same_weights(loaded, model)
    rows = some_sets(cluster)
    assert np.array_equal(loaded.predict(rows), model.predict(rows))
    assert (loaded.op, loaded.payload, loaded.seed) == (model.op, model.payload, model.seed)
    gpus = (("n01", (0, 1, 2, 3)), ("n02", (0, 1)))
    news = [Measurement((4, 2), 50 * GB, gpus)]
    assert same_weights(loaded.update(news), model.update(news))
    first = [p.read_bytes() for p in sorted(tmp_path.iterdir())]
    loaded.save(path)
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == first
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["model.json", "model.npz"]


def test_files_that_do_not_belong_together(
    tmp_path: Path, cluster: Cluster, table: MeasurementTable, model: HierarchicalTransformer
) -> None:
    """Weights of another model, of nobody, or a model of another cluster."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    model.save(one)
    HierarchicalTransformer.fit(cluster, table, seed=9, epochs=1).save(other)
    other.with_suffix(".npz").replace(one.with_suffix(".npz"))
    with pytest.raises(InputError, match=r"one\.npz: does not belong to .*one\.json"):
        HierarchicalTransformer.load(one, cluster)
    with pytest.raises(InputError, match=r"other\.npz: no such file"):
        HierarchicalTransformer.load(other, cluster)
    with pytest.raises(InputError, match="for another cluster"):
        HierarchicalTransformer.load(one, synthetic.cluster("pcie", 4))
    with pytest.raises(InputError, match="name of the weights"):
        model.save(tmp_path / "model.npz")


def saved_with(tmp_path: Path, model: HierarchicalTransformer, **arrays: Any) -> Path:
    """A model whose arrays somebody has changed, the hash too."""
    path = tmp_path / "changed.json"
    model.save(path)
    with np.load(path.with_suffix(".npz")) as loaded:
        content = dict(loaded)
    for key, value in arrays.items():
        content[key.replace("__", "/").replace("_dot_", ".")] = value
    content = {key: value for key, value in content.items() if value is not None}
    np.savez(path.with_suffix(".npz"), **content)
    document = json.loads(path.read_text())
    document["arrays_sha256"] = hashlib.sha256(path.with_suffix(".npz").read_bytes()).hexdigest()
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weights__embedding_dot_bias": None}, "missing"),
        ({"weights__embedding_dot_bias": np.zeros(3, np.float32)}, "shape 32x1, got"),
        ({"weights__embedding_dot_bias": np.zeros((32, 1))}, "got float64"),
        ({"weights__embedding_dot_bias": np.full((32, 1), np.nan, np.float32)}, "finite"),
        ({"weights__more": np.zeros(1)}, "too many"),
        ({"intra__0": np.zeros(7, np.int64)}, "intra/0"),
        ({"samples__tokens": np.full((N, 4), -1)}, "no measurements"),
        ({"samples__values": np.zeros(N, np.int64)}, "no measurements"),
        ({"samples__values": np.array([{}] * N)}, "is not a file of arrays"),
    ],
)
def test_changed_arrays_are_refused(
    tmp_path: Path,
    cluster: Cluster,
    model: HierarchicalTransformer,
    arrays: dict[str, Any],
    message: str,
) -> None:
    """Whatever the hash says; nothing pickled is ever read."""
    path = saved_with(tmp_path, model, **arrays)
    with pytest.raises(InputError, match=message):
        HierarchicalTransformer.load(path, cluster)


def test_absurd_weights_give_no_bandwidth(
    tmp_path: Path, cluster: Cluster, model: HierarchicalTransformer
) -> None:
    """Finite numbers that no training gives: a sentence in place of a number."""
    huge = {
        f"weights__{key.replace('.', '_dot_')}": np.full_like(value, 3e38)
        for key, value in model.weights.items()
    }
    loaded = HierarchicalTransformer.load(saved_with(tmp_path, model, **huge), cluster)
    with pytest.raises(InputError, match="fit the model anew"):
        loaded.predict(some_sets(cluster))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arrays", "../model.npz", "name of a file beside it"),
        ("arrays", "", "name of a file beside it"),
        ("arrays_sha256", "0" * 63, "arrays_sha256"),
        ("scaling", {"intra": [0, 1]}, "scaling"),
        ("op", "gossip", "op"),
        ("payload", 0, "payload"),
        ("format", "optsched.transformer/2", "newer"),
        ("more", 1, "unknown field"),
    ],
)
def test_changed_documents_are_refused(
    tmp_path: Path,
    cluster: Cluster,
    model: HierarchicalTransformer,
    field: str,
    value: Any,
    message: str,
) -> None:
    """Each with the field."""
    path = tmp_path / "model.json"
    model.save(path)
    document = json.loads(path.read_text())
    document[field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message):
        HierarchicalTransformer.load(path, cluster)


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
def test_wrong_measurements(cluster: Cluster, rows: list[Measurement], message: str) -> None:
    """Refused before any training."""
    with pytest.raises(InputError, match=message):
        HierarchicalTransformer.fit(cluster, MeasurementTable(tuple(rows)), epochs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"epochs": 0}, "epochs"),
        ({"threads": 0}, "threads"),
        ({"validation": 1.0}, "validation"),
        ({"validation": float("nan")}, "validation"),
        ({"intra": {"gone": IntraTable(2, [0, 0, 1])}}, "no type 'gone'"),
        ({"intra": {"nvswitch": IntraTable(2, [0, 0, 1])}}, "IntraTable of 8 GPUs, got one of 2"),
    ],
)
def test_wrong_arguments(
    cluster: Cluster, table: MeasurementTable, arguments: dict[str, Any], message: str
) -> None:
    """Each with its field."""
    with pytest.raises(InputError, match=message):
        HierarchicalTransformer.fit(cluster, table, **arguments)


def test_wrong_selections(model: HierarchicalTransformer) -> None:
    """Another shape or type."""
    with pytest.raises(InputError, match="selection"):
        model.predict(np.zeros((1, 31), np.bool_))
    with pytest.raises(InputError, match="selection"):
        model.predict(np.zeros((1, 32), np.int64))


def test_a_single_measurement_is_enough() -> None:
    """Deviations of 0 and a validation without patterns do no harm; nor do hosts without tables."""
    bare = Cluster.uniform(HostType("bare", 4), 3)
    found = HierarchicalTransformer.fit(
        bare, MeasurementTable((Measurement((2, 1), 80 * GB),)), epochs=3, validation=0.5
    )
    rows = np.ones((1, 12), np.bool_)
    assert 0 < found.predict(rows)[0] < 3000 * GB


def test_without_torch_the_message_says_what_to_install(
    cluster: Cluster, table: MeasurementTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And importing the model does not import torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"optsched\[torch\]"):
        HierarchicalTransformer.fit(cluster, table)
