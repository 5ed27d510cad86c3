"""The document ``optsched.subset/1``: a request for GPUs, the state, and the bandwidth model."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_origin, get_type_hints

import msgspec

from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement.problem import GpuPlacement
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
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.bandwidth.models.model import BandwidthModel

FORMAT = "optsched.subset/1"

_TYPES = get_type_hints(Policy)
_Policy = msgspec.defstruct("Policy", [
    (one.name, str if get_origin(_TYPES[one.name]) is Literal else _TYPES[one.name], one.default)
    for one in dataclasses.fields(Policy)
], forbid_unknown_fields=True, omit_defaults=True)  # fmt: skip
"""The fields of a policy as a strict part of a document; `Policy` checks its texts itself."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    file: str
    sha256: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    gpus: int
    policy: _Policy | None = None  # type: ignore[valid-type]
    traffic: str = "given"
    seed: int = 0
    state: Any
    model: Any


def read(path: str | os.PathLike[str]) -> GpuPlacement:
    """Read a GPU placement from a file; see `from_tree`."""
    return read_json(path, from_tree)


def from_tree(tree: Any, name: str) -> GpuPlacement:
    """Read a GPU placement from parsed JSON, ``optsched.subset/1``; `name` is the file in messages.

    The model is a document, or the ``file`` beside this one that holds it, with its ``sha256``.
    """
    found = decode_document(tree, _Document, FORMAT, name)
    model = _model(found.model, name)
    state = documents.state_from_tree(found.state, model.cluster, f"{name}: state")
    with placed(f"{name}: "):
        rules = None if found.policy is None else Policy(**msgspec.structs.asdict(found.policy))
        return GpuPlacement(
            state, model, found.gpus, policy=rules, traffic=found.traffic,  # type: ignore[arg-type]
            seed=found.seed, name=found.name,
        )  # fmt: skip


def to_json(problem: GpuPlacement, model_file: str | os.PathLike[str] | None = None) -> bytes:
    """The document ``optsched.subset/1``; with the model inside, or by the file beside it."""
    members: dict[str, Any] = {"format": FORMAT}
    if problem.name:
        members["name"] = problem.name
    members["gpus"] = problem.k
    if not problem.policy.is_free:
        fields = {key: getattr(problem.policy, key) for key in _Policy.__struct_fields__}
        members["policy"] = _Policy(**fields)
    if problem.traffic != "given":
        members["traffic"] = problem.traffic
    if problem.seed:
        members["seed"] = problem.seed
    members["state"] = nested(documents.state_json(problem.state))
    if model_file is None:
        members["model"] = nested(model_document.to_json(problem.model))
    else:
        digest = hashlib.sha256(read_bytes(model_file)).hexdigest()
        members["model"] = _File(Path(model_file).name, digest)
    return lines(members)


def policy_from_tree(tree: Mapping[str, Any], name: str) -> Policy:
    """A policy from parsed JSON; `InputError` names the field."""
    return Policy(**msgspec.structs.asdict(decode(tree, _Policy, name)))


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
