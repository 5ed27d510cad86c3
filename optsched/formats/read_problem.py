"""Read any instance file: what it holds is decided by its content, never by trial and error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from optsched.errors import InputError
from optsched.formats import arraypipe, jobshop_json, standard, taillard
from optsched.formats.jobshop_text import layout, lines_of
from optsched.io.files import read_text
from optsched.io.strict_json import check_kin, format_json, parse, without_collector
from optsched.io.values import format_value
from optsched.model import document
from optsched.model.schedule import Schedule
from optsched.problems.jobshop.problem import Format, JobShop

if TYPE_CHECKING:
    import os

    from optsched.model.schedule import Problem

READABLE = (
    "optsched.jobshop/1, optsched.jobarray/1, optsched.subset/1, optsched.quota/1, "
    "optsched.routing/1, optsched.schedule/1, job_shop_lib's (duration_matrix), ScheduleOpt's "
    "(data) and ArrayPipe's (n_stages, jobs)"
)


def read_problem(
    path: str | os.PathLike[str], format: Format = "auto", reentrant: bool = False
) -> Problem:
    """Read an instance of any kind.

    Parameters
    ----------
    path
        JSON (one of `READABLE`) or job-shop text (standard or Taillard's).
    format
        ``"auto"`` decides by the first character, a title line or the width of the first row;
        ``"standard"``, ``"taillard"`` and ``"json"`` insist.
    reentrant
        Standard text only: rows of any length, machines may repeat or be skipped.

    Returns
    -------
    Problem or Schedule
        `JobShop`, `JobArray`, `SubsetChoice`, `QuotaPlan`, `Routing`, or the graph of a
        schedule document, which is a problem too.

    Raises
    ------
    InputError
        With ``file:line`` or the path in the document, the rule and the value.
    """
    name, text = str(path), read_text(path)
    chosen = _format_of(text, name, format, reentrant)
    with without_collector():
        if chosen == "standard":
            return standard.from_text(text, name, reentrant)
        if chosen == "taillard":
            return taillard.from_text(text, name)
        return from_tree(parse(text, name), name)


def read_job_shop(
    path: str | os.PathLike[str], format: Format = "auto", reentrant: bool = False
) -> JobShop:
    """Read an instance that must be a job shop; see `read_problem`."""
    problem = read_problem(path, format, reentrant)
    if isinstance(problem, JobShop):
        return problem
    if isinstance(problem, Schedule):
        tree = parse(read_text(path), str(path))
        return jobshop_json.from_tree(tree, str(path))
    raise InputError(
        f"{path}: expected a job shop, got a {type(problem).__name__} "
        "(optsched.formats.read_problem reads every kind)"
    )


def from_tree(tree: Any, name: str) -> Problem:
    """The problem of a parsed JSON document."""
    if not isinstance(tree, dict):
        raise InputError(f"{name}: expected a JSON object, got {format_json(tree)}")
    family = str(tree.get("format", "")).partition("/")[0]
    if family == "optsched.schedule":
        return document.from_tree(tree, name).graph()
    if family == "optsched.jobarray":
        from optsched.formats import jobarray_json

        return jobarray_json.from_tree(tree, name)
    if family == "optsched.subset":
        from optsched.formats import subset_json

        return subset_json.from_tree(tree, name)
    if family == "optsched.routing" or tree.get("schema") == "slim-scenario/1":
        from optsched.problems.routing import document as routing

        return routing.from_tree(tree, name)
    if family == "optsched.quota":
        from optsched.problems.quota import document as quota_json

        return quota_json.from_tree(tree, name)
    if arraypipe.recognises(tree):
        return arraypipe.from_tree(tree, name)
    foreign = "format" not in tree and tree.keys() & {"duration_matrix", "machines_matrix", "data"}
    if family == "optsched.jobshop" or foreign:
        return jobshop_json.from_tree(tree, name)
    check_kin(tree, name)
    found = f"format {format_json(tree['format'])}" if "format" in tree else "no known keys"
    raise InputError(
        f"{name}: not an instance this optsched reads ({found}): readable are {READABLE}"
    )


def _format_of(text: str, name: str, format: str, reentrant: bool) -> str:
    if format not in get_args(Format):
        raise InputError(
            f"format: expected one of {', '.join(get_args(Format))}, got {format_value(format)}"
        )
    if reentrant and format in ("taillard", "json"):
        raise InputError(f'reentrant=True goes with format "standard", got "{format}"')
    if format != "auto":
        return format
    if text.lstrip()[:1] in ("{", "["):
        return "json"
    return "standard" if reentrant else layout(lines_of(text, name, 2), name)
