"""Documents of bandwidth models: what is read says what was written did; nonsense is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

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
from optsched.bandwidth.models.model import Interval
from optsched.errors import InputError

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


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("prior", {"kind": "oracle"}, 'kind: expected one of "bottleneck", "measured"'),
        ("measured", {"repeated": "median"}, 'repeated: expected one of "first"'),
        ("measured", {"fitted": {}}, 'unknown field "fitted"'),
        ("prior", {"format": "optsched.bandwidth/2"}, "newer than this optsched reads"),
    ],
)
def test_hostile(name, change, words, tmp_path):  # type: ignore[no-untyped-def]
    """The file, the field and the rule."""
    path = tmp_path / "m.json"
    write_model(models()[name], path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError) as caught:
        read_model(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_no_document() -> None:
    """Other models are refused by name."""
    model = models()["prior"]
    with pytest.raises(InputError, match="has no document"):
        write_model(Interval(model, "low"), "x.json")
