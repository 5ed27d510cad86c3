"""The document ``optsched.bandwidth/1``: cluster, measurements, and what was learnt from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from optsched.bandwidth.bottleneck import BottleneckBandwidth, Fitted
from optsched.bandwidth.features import MEANS
from optsched.bandwidth.measurements import Measurement, MeasurementTable
from optsched.bandwidth.patterns import parse_pattern, written_pattern
from optsched.bandwidth.rates import MOST
from optsched.errors import InputError
from optsched.formats import cluster_json
from optsched.io.files import read_text
from optsched.io.strict_json import (
    MAX_INTEGER,
    check_format,
    decode,
    format_json,
    parse,
    without_collector,
)

if TYPE_CHECKING:
    import os

    from optsched.bandwidth.cluster import Cluster

FORMAT = "optsched.bandwidth/1"

Rate = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
Local = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]


class _Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    pattern: str
    kilobytes: Rate
    gpus: dict[str, list[Local]] = {}
    censored: bool = False


class _Fitted(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    mean: str
    scales: list[float]
    held: list[str] = []


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    cluster: Any
    op: str = "all_reduce"
    payload: Bytes | None = None
    mixed: bool = False
    fitted: _Fitted | None = None
    measurements: list[_Row] = []


def read(path: str | os.PathLike[str], cluster: Cluster | None = None) -> BottleneckBandwidth:
    """Read a model from a file; see `from_tree`."""
    name = str(path)
    with without_collector():
        return from_tree(parse(read_text(path), name), name, cluster)


def from_tree(tree: Any, name: str, cluster: Cluster | None = None) -> BottleneckBandwidth:
    """Read a model from parsed JSON; it predicts what the one that was written did.

    Parameters
    ----------
    tree
        ``optsched.bandwidth/1``.
    name
        File name for messages.
    cluster
        The cluster that the model is for, if the caller has one.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value; also if the model is of another
        cluster than the one given.
    """
    check_format(tree, FORMAT, name)
    found = decode(tree, _Document, name)
    own = cluster_json.from_tree(found.cluster, f"{name}: cluster")
    if cluster is not None and cluster != own:
        raise InputError(
            f"{name}: cluster: is {own!r}, another one than {cluster!r}; fit a model for that one"
        )
    try:
        rows = tuple(_measurement(row, f"measurements[{i}]") for i, row in
                     enumerate(found.measurements))  # fmt: skip
        table = MeasurementTable(rows, found.op, found.payload, found.mixed)
        given = None if found.fitted is None else _fitted(found.fitted)
        model = BottleneckBandwidth(own if cluster is None else cluster, table, given)
        if given is not None:
            model.check_fitted()
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise
    return model


def to_json(model: BottleneckBandwidth) -> bytes:
    """The document ``optsched.bandwidth/1``: one measurement a line, defaults left out."""
    return written(model.cluster, model.table, model.fitted)


def written(cluster: Cluster, table: MeasurementTable, fitted: Fitted | None = None) -> bytes:
    """The document of a cluster, its measurements, and what was learnt from them."""
    encode = msgspec.json.encode
    members = [("format", encode(FORMAT)), ("op", encode(table.op))]
    if table.payload is not None:
        members.append(("payload", encode(table.payload)))
    if table.mixed:
        members.append(("mixed", encode(True)))
    if fitted is not None:
        held = [written_pattern(pattern) for pattern in fitted.held]
        members.append(
            ("fitted", encode(_Fitted(mean=fitted.mean, scales=list(fitted.scales), held=held)))
        )
    rows = [
        encode(_Row(
            pattern=written_pattern(row.pattern), kilobytes=row.value,
            gpus={host: list(ids) for host, ids in row.gpus}, censored=row.censored,
        ))
        for row in table
    ]  # fmt: skip
    listed = b"[\n    " + b",\n    ".join(rows) + b"\n  ]" if rows else b"[]"
    members.append(("measurements", listed))
    inner = cluster_json.to_json(cluster).rstrip().replace(b"\n", b"\n  ")
    members.append(("cluster", inner))
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def _measurement(row: _Row, place: str) -> Measurement:
    gpus = tuple((host, tuple(ids)) for host, ids in row.gpus.items())
    try:
        return Measurement(parse_pattern(row.pattern), row.kilobytes, gpus, row.censored)
    except InputError as error:
        error.args = (f"{place}.{error.args[0]}",)
        raise


def _fitted(given: _Fitted) -> Fitted:
    if given.mean not in MEANS:
        raise InputError(
            f"fitted.mean: expected one of {', '.join(MEANS)}, got {format_json(given.mean)}"
        )
    held = tuple(parse_pattern(text, f"fitted.held[{i}]") for i, text in enumerate(given.held))
    return Fitted(given.mean, tuple(given.scales), held)


__all__ = ["FORMAT", "from_tree", "read", "to_json", "written"]
