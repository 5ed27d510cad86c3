"""The document ``optsched.subset/1``: a request for GPUs, the state, and the bandwidth model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from optsched.bandwidth.contention import Contention
from optsched.bandwidth.policy import Policy
from optsched.errors import InputError
from optsched.formats import model_json, state_json
from optsched.io.files import read_bytes, read_text
from optsched.io.strict_json import check_format, decode, format_json, parse
from optsched.problems.gpus.problem import Request, SubsetChoice

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.bandwidth.model import BandwidthModel

FORMAT = "optsched.subset/1"


class _Policy(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    required: str | None = None
    preferred: str | None = None
    slice_size: int | None = None
    slice_level: str | None = None
    balance: str = "free"
    min_hosts: int = 1
    max_hosts: int | None = None
    same_type: bool = False
    include: list[str] | None = None
    exclude: list[str] | None = None


class _Contention(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    fill: str = "first"
    sides: str = "one"
    cross_only: bool = True
    skip_idle: bool = True
    whole: bool = False
    pooled: bool = False


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: int
    policy: _Policy = msgspec.field(default_factory=_Policy)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    file: str
    sha256: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    gpus: int | None = None
    requests: list[_Request] = []
    policy: _Policy | None = None
    contention: _Contention = msgspec.field(default_factory=_Contention)
    traffic: str = "given"
    seed: int = 0
    tolerance: float = 0.0
    on_unmeasured: str = "predict"
    max_regret: float | None = None
    objective: Literal["sum", "max_min"] = "sum"
    state: Any
    model: Any


def read(path: str | os.PathLike[str]) -> SubsetChoice:
    """Read a subset choice from a file; see `from_tree`."""
    return from_tree(parse(read_text(path), str(path)), str(path))


def from_tree(tree: Any, name: str) -> SubsetChoice:
    """Read a subset choice from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.subset/1``; the model is a document ``optsched.bandwidth/1`` or the ``file``
        that holds it (beside this one) with its ``sha256``.
    name
        File name for messages, and the place from which a model's file is looked for.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, FORMAT, name)
    found = decode(tree, _Document, name)
    model = _model(found.model, name)
    state = state_json.from_tree(found.state, model.cluster, f"{name}: state")
    rest: dict[str, Any] = {
        key: getattr(found, key)
        for key in ("traffic", "seed", "tolerance", "on_unmeasured", "max_regret", "objective")
    }
    try:
        requests = tuple(Request(r.name, r.gpus, policy(r.policy)) for r in found.requests)
        return SubsetChoice(
            state, model, found.gpus, requests=requests,
            policy=None if found.policy is None else policy(found.policy),
            contention=Contention(**_fields(found.contention)), name=found.name, **rest,
        )  # fmt: skip
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def to_json(problem: SubsetChoice, model_file: str | os.PathLike[str] | None = None) -> bytes:
    """The document ``optsched.subset/1``; with the model inside, or by the file beside it.

    Raises
    ------
    InputError
        The model has no document.
    """
    encode = msgspec.json.encode
    members: list[tuple[str, bytes]] = [("format", encode(FORMAT))]
    if problem.name:
        members.append(("name", encode(problem.name)))
    if len(problem.requests) == 1 and problem.requests[0].name == "job":
        members.append(("gpus", encode(problem.k)))
        if not problem.policy.is_free:
            members.append(("policy", encode(_policy(problem.policy))))
    else:
        rows = [encode(_Request(r.name, r.gpus, _policy(r.policy))) for r in problem.requests]
        members.append(("requests", b"[\n    " + b",\n    ".join(rows) + b"\n  ]"))
    if problem.contention != Contention():
        rule = _Contention(**{f: getattr(problem.contention, f) for f in _names(_Contention)})
        members.append(("contention", encode(rule)))
    plain = _Document(format="", state=None, model=None)
    for key in ("traffic", "seed", "tolerance", "on_unmeasured", "max_regret", "objective"):
        value = getattr(problem, key)
        if value != getattr(plain, key):
            members.append((key, encode(value)))
    members.append(("state", _indented(state_json.to_json(problem.state))))
    if model_file is None:
        members.append(("model", _indented(model_json.to_json(problem.model))))
    else:
        digest = hashlib.sha256(read_bytes(model_file)).hexdigest()
        members.append(("model", encode(_File(Path(model_file).name, digest))))
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def policy(given: _Policy) -> Policy:
    """A policy from its part of a document."""
    return Policy(**_fields(given))


def policy_from_tree(tree: Mapping[str, Any], name: str) -> Policy:
    """A policy from parsed JSON; `InputError` names the field."""
    return policy(decode(tree, _Policy, name))


def _policy(given: Policy) -> _Policy:
    fields = {f: getattr(given, f) for f in _names(_Policy)}
    for key in ("include", "exclude"):
        fields[key] = None if fields[key] is None else list(fields[key])
    return _Policy(**fields)


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
        return model_json.read_model(path)
    return model_json.from_tree(given, f"{name}: model")


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {field: getattr(struct, field) for field in struct.__struct_fields__}


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _indented(text: bytes) -> bytes:
    return text.rstrip().replace(b"\n", b"\n  ")


__all__ = ["FORMAT", "from_tree", "policy_from_tree", "read", "to_json"]
