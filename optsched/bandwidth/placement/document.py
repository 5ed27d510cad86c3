"""The document ``optsched.subset/1``: a request for GPUs, the state, and the bandwidth model."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_origin, get_type_hints

import msgspec

from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement.problem import GpuPlacement, Request
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.policy import Policy
from optsched.errors import InputError
from optsched.io.files import read_bytes
from optsched.io.strict_json import (
    decode,
    decode_document,
    format_json,
    lines,
    nested,
    placed,
    read_json,
    rows,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.bandwidth.models.model import BandwidthModel

T = TypeVar("T")

FORMAT = "optsched.subset/1"


def _struct(kind: type) -> Any:
    """The fields of a dataclass as a strict part of a document; it checks its texts itself."""
    types = get_type_hints(kind)
    fields = [
        (one.name, str if get_origin(types[one.name]) is Literal else types[one.name], one.default)
        for one in dataclasses.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, omit_defaults=True)


_Policy = _struct(Policy)
_FIELDS = ("traffic", "seed", "tolerance", "on_unmeasured", "max_regret", "objective")


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: int
    policy: _Policy = msgspec.field(default_factory=_Policy)  # type: ignore[valid-type]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    file: str
    sha256: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    gpus: int | None = None
    requests: list[_Request] = []
    policy: _Policy | None = None  # type: ignore[valid-type]
    traffic: str = "given"
    seed: int = 0
    tolerance: float = 0.0
    on_unmeasured: str = "predict"
    max_regret: float | None = None
    objective: Literal["sum", "max_min"] = "sum"
    state: Any
    model: Any


def read(path: str | os.PathLike[str]) -> GpuPlacement:
    """Read a GPU placement from a file; see `from_tree`."""
    return read_json(path, from_tree)


def from_tree(tree: Any, name: str) -> GpuPlacement:
    """Read a GPU placement from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.subset/1``; the model is a document ``optsched.bandwidth/1`` or the ``file``
        that holds it (beside this one) with its ``sha256``.
    name
        File name for messages, and the place from which a model's file is read.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    found = decode_document(tree, _Document, FORMAT, name)

    model = _model(found.model, name)
    state = documents.state_from_tree(found.state, model.cluster, f"{name}: state")
    fields: dict[str, Any] = {key: getattr(found, key) for key in _FIELDS}
    with placed(f"{name}: "):
        requests = tuple(Request(r.name, r.gpus, _made(Policy, r.policy)) for r in found.requests)
        return GpuPlacement(
            state, model, found.gpus, requests=requests,
            policy=None if found.policy is None else _made(Policy, found.policy),
            name=found.name, **fields,
        )  # fmt: skip


def to_json(problem: GpuPlacement, model_file: str | os.PathLike[str] | None = None) -> bytes:
    """The document ``optsched.subset/1``; with the model inside, or by the file beside it.

    Raises
    ------
    InputError
        The model has no document.
    """
    members: dict[str, Any] = {"format": FORMAT}
    if problem.name:
        members["name"] = problem.name
    if len(problem.requests) == 1 and problem.requests[0].name == "job":
        members["gpus"] = problem.k
        if not problem.policy.is_free:
            members["policy"] = _part(_Policy, problem.policy)
    else:
        members["requests"] = rows(
            _Request(r.name, r.gpus, _part(_Policy, r.policy)) for r in problem.requests
        )
    defaults = _Document(format="", state=None, model=None)
    for key in _FIELDS:
        if (value := getattr(problem, key)) != getattr(defaults, key):
            members[key] = value
    members["state"] = nested(documents.state_json(problem.state))
    if model_file is None:
        members["model"] = nested(model_document.to_json(problem.model))
    else:
        digest = hashlib.sha256(read_bytes(model_file)).hexdigest()
        members["model"] = _File(Path(model_file).name, digest)
    return lines(members)


def policy_from_tree(tree: Mapping[str, Any], name: str) -> Policy:
    """A policy from parsed JSON; `InputError` names the field."""
    return _made(Policy, decode(tree, _Policy, name))


def _made(kind: type[T], given: Any) -> T:
    """The object that a part of a document means."""
    return kind(**msgspec.structs.asdict(given))


def _part(struct: Any, given: Any) -> Any:
    """The part of a document that an object is."""
    return struct(**{key: getattr(given, key) for key in struct.__struct_fields__})


def _model(given: Any, name: str) -> BandwidthModel:
    if isinstance(given, dict) and "file" in given:
        link = decode(given, _File, f"{name}: model")
        path = Path(name).parent / link.file
        data = read_bytes(path)
        found = hashlib.sha256(data).hexdigest()
        if found != link.sha256:
            raise InputError(
                f"{name}: model.sha256: {path} has {found[:12]}, expected "
                f"{format_json(link.sha256)}: "
                "the model has changed"
            )
        return model_document.read_model(path)
    return model_document.from_tree(given, f"{name}: model")
