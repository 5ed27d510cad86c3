"""The document ``optsched.quota/1``: jobs with what each may get, nodes or a budget, objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.io.strict_json import check_format, decode, lines, placed, read_json, rows
from optsched.problems.quota.job import QuotaJob
from optsched.problems.quota.problem import Node, QuotaPlan

if TYPE_CHECKING:
    import os

FORMAT = "optsched.quota/1"

_PerType = Any  # `QuotaJob` checks it: msgspec does not name the keys of mappings


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    sizes: _PerType = None
    minimum: _PerType = None
    maximum: _PerType = None
    utility: _PerType = None
    idle: float = 0.0
    score: float | None = None
    work: int | None = None
    rates: _PerType = None
    weight: float = 1.0
    must_run: bool = False
    current: _PerType = None
    locality: str = "any"
    pass_work: int | None = None


class _Node(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: int
    type: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    objective: str = "sum"
    resolution: int = 10**6
    time_unit: str = "s"
    budget: _PerType = None
    nodes: list[_Node] | None = None
    jobs: list[_Job]


def read(path: str | os.PathLike[str]) -> QuotaPlan:
    """Read a quota plan from a file; see `from_tree`."""
    return read_json(path, from_tree)


def from_tree(tree: Any, name: str) -> QuotaPlan:
    """Read a quota plan from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.quota/1``; fields are those of `QuotaPlan` and `QuotaJob` (rates for a speedup).
    name
        File name for messages.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, FORMAT, name)
    found = decode(tree, _Document, name)
    nodes = None if found.nodes is None else [Node(n.gpus, n.type, n.name) for n in found.nodes]
    fields: dict[str, Any] = {key: getattr(found, key) for key in (*_LABELS, "budget")}
    with placed(f"{name}: "):
        jobs = [QuotaJob(**{f: getattr(job, f) for f in _JOB}) for job in found.jobs]
        return QuotaPlan(jobs, nodes=nodes, **fields)


def to_json(plan: QuotaPlan) -> bytes:
    """The document ``optsched.quota/1``, one job a line."""
    members: dict[str, Any] = {"format": FORMAT}
    for key in _LABELS:
        value = getattr(plan, key)
        if value != getattr(_PLAIN, key) or key == "objective":
            members[key] = value
    if plan.nodes:
        members["nodes"] = rows(_Node(node.name, node.gpus, node.type) for node in plan.nodes)
    else:
        members["budget"] = _budget(plan)
    members["jobs"] = rows({f: v for f, v in _fields(job) if v != _DEFAULT[f]} for job in plan.jobs)
    return lines(members)


def content(plan: QuotaPlan) -> bytes:
    """What a plan is, its own name left out, for its hash."""
    jobs = [[value for _, value in _fields(job)] for job in plan.jobs]
    whole = [
        plan.objective, plan.resolution, plan.time_unit, list(plan.nodes) or _budget(plan), jobs
    ]  # fmt: skip
    return msgspec.json.encode(whole, order="deterministic")


def _budget(plan: QuotaPlan) -> int | dict[str, int]:
    of = dict(zip(plan.kinds, plan.budgets, strict=True))
    return of[""] if plan.kinds == ("",) else of


def _fields(job: QuotaJob) -> list[tuple[str, Any]]:
    """Fields of a document; what is not given is None."""
    given = job.given()
    if given.get("minimum") == 1:
        del given["minimum"]
    given["current"] = given["current"] or None
    return [(f, given.get(f)) for f in _JOB]


_LABELS = ("name", "objective", "resolution", "time_unit")
_JOB = _Job.__struct_fields__
_DEFAULT = {"name": None, **dict(zip(_JOB[1:], _Job.__struct_defaults__, strict=True))}
_PLAIN = _Document(format="", jobs=[])

__all__ = ["FORMAT", "content", "from_tree", "read", "to_json"]
