"""The document ``optsched.bandwidth/1``: cluster and measurements, which give the model back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.patterns import parse_pattern, written_pattern
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.foreign import read_document
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import MAX_INTEGER, decode_document, lines, nested, placed, rows

if TYPE_CHECKING:
    import os

    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.topology.cluster import Cluster

FORMAT = "optsched.bandwidth/1"
_CLASSES: dict[str, type[BottleneckBandwidth | MeasuredBandwidth]] = {
    "bottleneck": BottleneckBandwidth, "measured": MeasuredBandwidth,
}  # fmt: skip


class _Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    pattern: str
    kilobytes: Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
    gpus: dict[str, list[Annotated[int, msgspec.Meta(ge=0, lt=4096)]]] = {}
    censored: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    kind: Literal["bottleneck", "measured"] = "bottleneck"
    repeated: Literal["first"] = "first"
    """Of a measured model: the first run of a pattern counts."""
    cluster: Any
    op: str = "all_reduce"
    payload: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)] | None = None
    mixed: bool = False
    measurements: list[_Row] = []


def read_model(path: str | os.PathLike[str], cluster: Cluster | None = None) -> BandwidthModel:
    """Read a model of any kind from a file; see `from_tree`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from optsched.bandwidth import BottleneckBandwidth, read_model, synthetic, write_model
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.json"
    ...     write_model(BottleneckBandwidth(synthetic.cluster("nvswitch", 2)), path)
    ...     read_model(path)
    <BottleneckBandwidth of <Cluster '': 2 hosts, 16 GPUs>, 0 patterns measured>
    """
    return read_document(path, from_tree, cluster)


def write_model(model: BandwidthModel, path: str | os.PathLike[str]) -> None:
    """Write a model's document, all of it or nothing; `InputError` if it has none.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from optsched.bandwidth import BottleneckBandwidth, synthetic, write_model
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.json"
    ...     write_model(BottleneckBandwidth(synthetic.cluster("nvswitch", 2)), path)
    ...     "optsched.bandwidth/1" in path.read_text()
    True
    """
    write_atomic(path, to_json(model))


def from_tree(tree: Any, name: str, cluster: Cluster | None = None) -> BandwidthModel:
    """Read a model of any kind from parsed JSON; it predicts what the one that was written did.

    A model of another cluster than the one given is refused; that may lack fitted factors. Errors
    begin with `name` and the path in the document.
    """
    found = decode_document(tree, _Document, FORMAT, name)
    of = documents.cluster_from_tree(found.cluster, f"{name}: cluster")
    if cluster is not None and cluster != of:
        given = cluster.factors.items()
        if not given <= of.factors.items() or cluster != replace(of, factors=dict(given)):
            what = f"is {of!r}, another one than {cluster!r}; fit a model for that one"
            raise InputError(f"{name}: cluster: {what}")
    elif cluster is not None:
        of = cluster
    with placed(f"{name}: "):
        measured = tuple(_measurement(row, i) for i, row in enumerate(found.measurements))
        table = MeasurementTable(measured, found.op, found.payload, found.mixed)
        return _CLASSES[found.kind](of, table)


def to_json(model: BandwidthModel) -> bytes:
    """The document of a model: one measurement a line, defaults left out."""
    if not isinstance(model, (BottleneckBandwidth, MeasuredBandwidth)):
        raise InputError(
            f"model: a {type(model).__name__} has no document {FORMAT}; those that have: "
            f"{', '.join(_CLASSES)}"
        )
    table = model.table
    members: dict[str, Any] = {"format": FORMAT}
    if isinstance(model, MeasuredBandwidth):
        members["kind"] = "measured"
    members["op"] = table.op
    if table.payload is not None:
        members["payload"] = table.payload
    if table.mixed:
        members["mixed"] = True
    members["measurements"] = rows(
        _Row(
            pattern=written_pattern(row.pattern), kilobytes=row.value,
            gpus={host: list(ids) for host, ids in row.gpus}, censored=row.censored,
        )
        for row in table
    )  # fmt: skip
    return lines(members | {"cluster": nested(documents.cluster_json(model.cluster))})


def _measurement(row: _Row, i: int) -> Measurement:
    gpus = tuple((host, tuple(ids)) for host, ids in row.gpus.items())
    with placed(f"measurements[{i}]."):
        return Measurement(parse_pattern(row.pattern), row.kilobytes, gpus, row.censored)
