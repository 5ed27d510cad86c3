"""Bandwidth models of every kind as ``optsched.bandwidth/1``: the field ``kind`` tells which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from optsched.bandwidth.bottleneck import BottleneckBandwidth
from optsched.bandwidth.measured import MeasuredBandwidth
from optsched.bandwidth.model import CountModel
from optsched.bandwidth.pods import PodBandwidth
from optsched.errors import InputError
from optsched.formats import bandwidth_json, cluster_json
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import check_format, decode, format_json, parse, without_collector

if TYPE_CHECKING:
    import os

    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.model import BandwidthModel

FORMAT = bandwidth_json.FORMAT
KINDS = ("bottleneck", "measured", "pods")


class _Pods(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    kind: str
    factor: float
    one_gpu_pod: Literal["nic", "zero"] = "nic"
    locals: list[Any]
    cluster: Any


def read_model(path: str | os.PathLike[str], cluster: Cluster | None = None) -> BandwidthModel:
    """Read a model of any kind from a file; see `from_tree`."""
    name = str(path)
    with without_collector():
        return from_tree(parse(read_text(path), name), name, cluster)


def write_model(model: BandwidthModel, path: str | os.PathLike[str]) -> None:
    """Write a model's document, all of it or nothing; `InputError` if it has none."""
    write_atomic(path, to_json(model))


def from_tree(tree: Any, name: str, cluster: Cluster | None = None) -> BandwidthModel:
    """Read a model of any kind from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.bandwidth/1``; without ``kind`` a `BottleneckBandwidth`.
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
    kind = tree.get("kind", "bottleneck")
    if kind == "pods":
        return _pods(tree, name, cluster)
    if kind not in KINDS:
        raise InputError(
            f"{name}: kind: expected one of {', '.join(KINDS)}, got {format_json(kind)}"
        )
    rest = {key: value for key, value in tree.items() if key not in ("kind", "repeated")}
    if kind == "bottleneck":
        if "repeated" in tree:
            raise InputError(f'{name}: top level: unknown field "repeated"')
        return bandwidth_json.from_tree(rest, name, cluster)
    if "fitted" in tree:
        raise InputError(f'{name}: top level: unknown field "fitted"')
    known = bandwidth_json.from_tree(rest, name, cluster)
    repeated = tree.get("repeated", "first")
    if repeated not in ("first", "median"):
        raise InputError(f"{name}: repeated: expected first or median, got {format_json(repeated)}")
    return MeasuredBandwidth(known.cluster, known.table, repeated)


def to_json(model: BandwidthModel) -> bytes:
    """The document of a model.

    Raises
    ------
    InputError
        This kind of model has none.
    """
    if isinstance(model, BottleneckBandwidth):
        return bandwidth_json.to_json(model)
    if isinstance(model, MeasuredBandwidth):
        plain = bandwidth_json.written(model.cluster, model.table)
        head = b'{\n  "kind": "measured",\n  "repeated": "%s",\n' % model.repeated.encode()
        return plain.replace(b"{\n", head, 1)
    if isinstance(model, PodBandwidth):
        encode = msgspec.json.encode
        parts = [_indented(to_json(local)) for local in model.locals]
        members = [
            ("format", encode(FORMAT)), ("kind", b'"pods"'), ("factor", encode(model.factor)),
            ("one_gpu_pod", encode(model.one_gpu_pod)),
            ("locals", b"[\n  " + b",\n  ".join(parts) + b"\n  ]"),
            ("cluster", _indented(cluster_json.to_json(model.cluster))),
        ]  # fmt: skip
        body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
        return b"{\n" + body + b"\n}\n"
    raise InputError(
        f"model: a {type(model).__name__} has no document {FORMAT}; those that have: "
        f"{', '.join(KINDS)}"
    )


def _pods(tree: Any, name: str, cluster: Cluster | None) -> PodBandwidth:
    found = decode(tree, _Pods, name)
    own = cluster_json.from_tree(found.cluster, f"{name}: cluster")
    if cluster is not None and cluster != own:
        raise InputError(f"{name}: cluster: is {own!r}, another one than {cluster!r}")
    parts = []
    for i, local in enumerate(found.locals):
        part = from_tree(local, f"{name}: locals[{i}]")
        if not isinstance(part, CountModel):
            raise InputError(f"{name}: locals[{i}].kind: pods have no pods within")
        parts.append(part)
    try:
        return PodBandwidth(parts, own, found.factor, found.one_gpu_pod)
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def _indented(text: bytes) -> bytes:
    return text.rstrip().replace(b"\n", b"\n  ")


__all__ = ["FORMAT", "from_tree", "read_model", "to_json", "write_model"]
