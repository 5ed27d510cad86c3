"""The document ``optsched.quota/1``: jobs with what each may get, nodes or a budget, objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.io.strict_json import decode_document, lines, placed, read_json, rows
from optsched.problems.quota.job import DEFAULTS, QuotaJob
from optsched.problems.quota.problem import Node, QuotaPlan

if TYPE_CHECKING:
    import os

FORMAT = "optsched.quota/1"

_JOB = [(key, Any, value) for key, value in DEFAULTS.items() if key != "name"]  # `QuotaJob` checks
_Job = msgspec.defstruct("_Job", [("name", str), *_JOB], forbid_unknown_fields=True)


class _Node(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: int
    type: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    name: str = ""
    objective: str = "sum"
    resolution: int = 10**6
    time_unit: str = "s"
    budget: Any = None
    nodes: list[_Node] | None = None
    jobs: list[_Job]  # type: ignore[valid-type]


def read(path: str | os.PathLike[str]) -> QuotaPlan:
    """Read a quota plan from a file; see `from_tree`."""
    return read_json(path, from_tree)


def from_tree(tree: Any, name: str) -> QuotaPlan:
    """Read a quota plan from parsed JSON; `name` is the file, for messages."""
    found = decode_document(tree, _Document, FORMAT, name)
    nodes = None if found.nodes is None else [Node(n.gpus, n.type, n.name) for n in found.nodes]
    fields: dict[str, Any] = {key: getattr(found, key) for key in (*_LABELS, "budget")}
    with placed(f"{name}: "):
        jobs = [QuotaJob(**msgspec.structs.asdict(job)) for job in found.jobs]
        return QuotaPlan(jobs, nodes=nodes, **fields)


def to_json(plan: QuotaPlan) -> bytes:
    """The document ``optsched.quota/1``, one job a line."""
    members: dict[str, Any] = {"format": FORMAT}
    for key in _LABELS:
        value = getattr(plan, key)
        if value != getattr(_DEFAULT, key) or key == "objective":
            members[key] = value
    if plan.nodes:
        members["nodes"] = rows(_Node(node.name, node.gpus, node.type) for node in plan.nodes)
    else:
        members["budget"] = plan.budget
    members["jobs"] = rows(job.given() for job in plan.jobs)
    return lines(members)


def content(plan: QuotaPlan) -> bytes:
    """Return the content of a plan without its name, for its hash."""
    jobs = [list({**DEFAULTS, **job.given()}.values()) for job in plan.jobs]
    whole = [plan.objective, plan.resolution, plan.time_unit, plan.nodes or plan.budget, jobs]
    return msgspec.json.encode(whole, order="deterministic")


_LABELS = ("name", "objective", "resolution", "time_unit")
_DEFAULT = _Document(format="", jobs=[])

__all__ = ["FORMAT", "content", "from_tree", "read", "to_json"]
