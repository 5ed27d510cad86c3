"""JSON Schemas of documents and messages."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final, get_args, get_origin

import msgspec

from optsched.errors import InputError
from optsched.io.values import did_you_mean
from optsched.service.answers import Refusal

_REF: Final = "#/components/schemas/"

DOCUMENTS: Final = {
    "bandwidth": "bandwidth.models.model_document:_Document",
    "cluster": "bandwidth.topology.documents:_Cluster",
    "decide": "cluster.determined.decisions:Pool State",
    "decision": "cluster.determined.document:Answer",
    "jobarray": "problems.jobarray.document:_Document",
    "jobshop": "problems.jobshop.document:_Document",
    "quota": "problems.quota.document:_Document",
    "schedule": "model.document:_Document",
    "snapshot": "plan.snapshot:_Snapshot",
    "state": "bandwidth.topology.documents:_State",
    "subset": "bandwidth.placement.document:_Document",
}
"""Documents by name, and the structs that read them."""

_PARTS: Final = {
    "bandwidth": {"cluster": "cluster"},
    "snapshot": {"cluster": "cluster", "state": "state"},
    "subset": {"state": "state"},
}
"""Members of documents that are documents."""

_messages: dict[str, Any] = {"Refusal": Refusal}
"""Structs of the endpoints by name."""


def reference(kind: Any) -> dict[str, Any]:
    """Return a reference to the schema of a struct, of a list of some, or of a document."""
    if isinstance(kind, str):
        return {"$ref": f"{_REF}{kind}"}
    if kind is dict:
        return {"type": "object"}
    if get_origin(kind) is list:
        return {"type": "array", "items": reference(get_args(kind)[0])}
    _messages[kind.__name__] = kind
    return {"$ref": f"{_REF}{kind.__name__}"}


def components() -> dict[str, Any]:
    """Return the schemas of all documents and messages, for ``components.schemas``."""
    found: dict[str, Any] = {}
    for name, place in DOCUMENTS.items():
        module, _, kinds = place.partition(":")
        loaded = import_module(f"optsched.{module}")
        (top, *_), parts = msgspec.json.schema_components(
            [getattr(loaded, kind) for kind in kinds.split()], ref_template=f"{_REF}{name}.{{name}}"
        )
        title = top["$ref"].rpartition(".")[2]
        text = msgspec.json.encode({f"{name}.{key}": one for key, one in parts.items()}).decode()
        made = msgspec.json.decode(re.sub(rf'{name}\.{title}"', f'{name}"', text))
        for member, other in _PARTS.get(name, {}).items():
            made[name]["properties"][member] = reference(other)
        made[name]["title"] = f"optsched.{name}/1"
        found |= made
    file = {"type": "object", "required": ["file", "sha256"]}  # beside a document that is a file
    found["subset"]["properties"]["model"] = {"anyOf": [reference("bandwidth"), file]}
    pool, state = found["decide"], found.pop("decide.State")
    pool |= {"properties": pool["properties"] | state["properties"], "required": ["format"]}
    del pool["properties"]["state"]  # its members are those of the document
    pool["properties"] |= {
        "format": {"const": "optsched.decide/1"}, "id": {"type": ["integer", "string", "null"]},
        "pools": {"type": "array", "items": {"type": "object"}},
    }  # fmt: skip
    _, parts = msgspec.json.schema_components([*_messages.values()], ref_template=f"{_REF}{{name}}")
    return found | parts


def bundle(name: str) -> dict[str, Any]:
    """Return one schema, and all others below ``$defs``, as a document of JSON Schema."""
    known = components()
    if name not in known:
        raise InputError(
            f"name: expected one of {', '.join(known)}, got {name!r:.60}{did_you_mean(name, known)}"
        )
    tree = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": f"#/$defs/{name}",
            "$defs": known}  # fmt: skip
    text = msgspec.json.encode(tree).decode().replace(_REF, "#/$defs/")
    found: dict[str, Any] = msgspec.json.decode(text)
    return found
