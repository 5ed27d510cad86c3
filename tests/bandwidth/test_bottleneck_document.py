"""The document of a learnt bandwidth model: what is written is what predicts afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import synthetic
from optsched.bandwidth.models import model_document
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.errors import InputError
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import Cluster

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
