"""Documents of bandwidth models: what is read says what was written did; nonsense is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    HostType,
    IntraTable,
    MeasuredBandwidth,
    Measurement,
    MeasurementTable,
    read_model,
    synthetic,
    write_model,
)
from optsched.bandwidth.models import model_document
from optsched.bandwidth.models.model import Interval
from optsched.errors import InputError
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from pathlib import Path


KIND = HostType("small", 2, intra=IntraTable.from_rates(2, {"2": 30.0}))
ROWS = [
    Measurement((1, 1), 9_000_000),
    Measurement((2, 1), 7_000_000),
    Measurement((2,), 8_000_000),
]


def models():  # type: ignore[no-untyped-def]
    """One of each kind that has a document."""
    flat = Cluster.uniform(KIND, 3)
    table = MeasurementTable(tuple(ROWS), payload=1 << 20)
    return {
        "prior": BottleneckBandwidth(flat),
        "fitted": BottleneckBandwidth(flat).fit(table),
        "measured": MeasuredBandwidth(flat, table),
    }


@pytest.mark.parametrize("name", ["prior", "fitted", "measured"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The same kind, the same numbers, the same bytes."""
    model = models()[name]
    write_model(model, tmp_path / "m.json")
    read = read_model(tmp_path / "m.json", model.cluster)
    assert type(read) is type(model) and read.cluster == model.cluster
    rows = np.random.default_rng(0).random((200, model.cluster.n_gpus)) < 0.4
    for ours, theirs in zip(model.interval(rows), read.interval(rows), strict=True):
        assert ours.tolist() == theirs.tolist()
    write_model(read, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "m.json").read_bytes()


def test_a_subset_document_holds_any_model(tmp_path: Path) -> None:
    """Pods and measured tables inside an instance."""
    for name, model in models().items():
        problem = optsched.GpuPlacement(
            synthetic.tenants(model.cluster, 1), model, 2, traffic="idle", name=name
        )
        problem.write(tmp_path / "p.json")
        read = optsched.GpuPlacement.read(tmp_path / "p.json")
        ours, theirs = optsched.solve(problem), optsched.solve(read)
        assert (ours.status, ours.objective) == (theirs.status, theirs.objective)


def test_no_document() -> None:
    """Other models are refused by name."""
    model = models()["prior"]
    with pytest.raises(InputError, match="has no document"):
        write_model(Interval(model, "low"), "x.json")


# the document of a learnt bandwidth model: what is written is what predicts afterwards

CLUSTER = synthetic.cluster(["nvswitch", "pcie"], 3)


def table(seed: int = 0, n: int = 25) -> MeasurementTable:
    """Some measurements: with GPUs and without, beside traffic, on one host."""
    rng = np.random.default_rng(seed)
    full = synthetic.network(CLUSTER, seed).rows
    rows = [full[i] for i in rng.permutation(len(full))[:n]]
    rows.append(Measurement((8, 8), 390_000_000, censored=True))
    rows.append(Measurement((2, 1), 7_654_321, (("n01", (3, 5)), ("n03", (0,)))))
    return MeasurementTable(tuple(rows), "all_gather", 16 << 20, mixed=True)


def tree(model: BottleneckBandwidth) -> dict[str, Any]:
    """The document as a tree."""
    found: dict[str, Any] = json.loads(model_document.to_json(model))
    return found


def back(given_tree: dict[str, Any], cluster: Cluster | None = None) -> BottleneckBandwidth:
    """Read a tree."""
    return model_document.from_tree(given_tree, "m.json", cluster)


@few_examples
@given(st.integers(0, 10**6), st.integers(0, 60))
def test_what_is_read_predicts_the_same_bits(seed: int, n: int) -> None:
    """Values and both ends of intervals, measurements, collective, payload."""
    model = BottleneckBandwidth(CLUSTER).fit(table(seed, n))
    text = model_document.to_json(model)
    read = model_document.from_tree(parse(text.decode(), "m"), "m")
    assert read.table == model.table
    assert (read.op, read.payload, read.table.mixed) == ("all_gather", 16 << 20, True)
    for which in ("value", "low", "high"):
        one, two = model.tables(which), read.tables(which)
        assert one is not None
        assert two is not None
        assert one.sha256 == two.sha256
    assert model_document.to_json(read) == text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["format"], "optsched.bandwidth/2", "is newer than this optsched reads"),
        (["kind"], "oracle", 'kind: expected one of "bottleneck", "measured"'),
        (["repeated"], "median", 'repeated: expected one of "first"'),
        (["colour"], 1, 'unknown field "colour"'),
        (["op"], "gossip", "op: expected one of all_reduce"),
        (["payload"], 0, "payload"),
        (["measurements", 0, "pattern"], "4+x", r"measurements\[0\].*expected counts such as 5\+3"),
        (["measurements", 0, "pattern"], "9+1", r"measurements\[0\].pattern: 9\+1 does not fit"),
        (["measurements", 0, "kilobytes"], -1, r"measurements\[0\].kilobytes: expected"),
        (["measurements", 0, "kilobytes"], 1.5, r"measurements\[0\].kilobytes: expected an integ"),
        (["measurements", 26, "gpus"], {"n09": [1, 2], "n01": [0]}, "there is no host 'n09'"),
        (["measurements", 26, "gpus"], {"n01": [1]}, r"measurements\[26\].gpus: are not of the"),
        (["cluster", "hosts"], [], "cluster: hosts"),
        (["cluster", "types", 0, "gpus"], 0, "cluster: types"),
    ],
)
def test_what_is_wrong_is_refused(path: list[Any], value: object, words: str) -> None:
    """With file, path and rule."""
    document = tree(BottleneckBandwidth(CLUSTER).fit(table()))
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(InputError, match=words) as caught:
        back(document)
    assert str(caught.value).startswith("m.json: ")
