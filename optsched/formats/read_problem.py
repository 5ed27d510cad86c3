"""Read any instance file; its content selects the format."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.formats.registry import Source, readers
from optsched.formats.standard import refuse_flexible
from optsched.io.files import read_text
from optsched.io.strict_json import check_kin, format_json, parse, placed, without_collector
from optsched.io.values import one_of
from optsched.model import document
from optsched.model.schedule import Schedule
from optsched.problems.jobshop import published
from optsched.problems.jobshop.document import from_graph
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    import os

    from optsched.formats.registry import Reader
    from optsched.model.schedule import Problem

DOCUMENTS: Final = {
    "optsched.jobshop": "optsched.problems.jobshop.document",
    "optsched.jobarray": "optsched.problems.jobarray.document",
    "optsched.subset": "optsched.bandwidth.placement.document",
    "optsched.quota": "optsched.problems.quota.document",
}
"""Documents of this library, and the modules with their ``from_tree``."""

_COMMANDS: Final = {
    "optsched.cluster": "gpus topology show", "optsched.bandwidth": "gpus bandwidth check --model",
    "optsched.state": "gpus topology show CLUSTER --state", "optsched.snapshot": "plan",
    "optsched.decide": "cluster decide", "optsched.decision": "cluster manifest",
    "optsched.routing": "slim simulate", "optsched.serving-log": "slim check SCENARIO",
}  # fmt: skip
"""Documents that are no instances, and the commands that read them."""

READABLE: Final = (
    f"{', '.join(f'{family}/1' for family in DOCUMENTS)}, optsched.schedule/1, job_shop_lib's "
    "(duration_matrix) and ArrayPipe's (n_stages, jobs)"
)


def read_problem(
    path: str | os.PathLike[str], format: str = "auto", reentrant: bool = False
) -> Problem:
    """Read an instance of any kind.

    Parameters
    ----------
    path
        JSON (one of `READABLE`), job-shop text (standard or Taillard's), or a format that another
        package adds, see `optsched.formats.registry`; or the name of a published job shop, such
        as ``ta01``, if no file has it (`optsched.problems.jobshop.published`).
    format
        ``"auto"`` decides by the content; else ``"json"`` or the name of a format, such as
        ``"standard"`` and ``"taillard"``.
    reentrant
        Standard text only: rows of any length, machines may repeat or be skipped.

    Returns
    -------
    Problem or Schedule
        `JobShop`, `JobArray`, `GpuPlacement`, `QuotaPlan`, or the graph of a
        schedule document, which is a problem too.

    Raises
    ------
    InputError
        With ``file:line`` or the path in the document, the rule and the value.

    Examples
    --------
    >>> from optsched.formats.read_problem import read_problem
    >>> read_problem("ft06").n_operations
    36
    """
    if format not in ("auto", "json"):  # readers are imported only for files that need them
        one_of("format", format, ["auto", "json", *readers()])
    if format == "auto" and published.is_name(str(path)):
        return published.instance(str(path))
    name, text = str(path), read_text(path)
    if reentrant and format not in ("auto", "standard"):
        raise InputError(f'reentrant=True goes with format "standard", got "{format}"')
    with without_collector():
        is_json = text.lstrip()[:1] in ("{", "[")
        if format == "json" or (format == "auto" and is_json):
            return from_tree(parse(text, name), name)
        if reentrant and format == "auto":
            refuse_flexible(text, name)
            format = "standard"
        tree = parse(text, name) if is_json and format not in ("standard", "taillard") else None
        source = Source(name, text, tree, reentrant)
        reader = readers()[format] if format != "auto" else _recognised(source)
        assert reader is not None  # unknown texts are refused by the last readers
        problem: Problem = reader.read(source)
        return problem


def read_job_shop(
    path: str | os.PathLike[str], format: str = "auto", reentrant: bool = False
) -> JobShop:
    """Read an instance that must be a job shop; see `read_problem`."""
    problem = read_problem(path, format, reentrant)
    if isinstance(problem, JobShop):
        return problem
    if isinstance(problem, Schedule):
        with placed(f"{path}: "):
            return from_graph(document.read(read_text(path), str(path)))
    raise InputError(
        f"{path}: expected a job shop, got a {type(problem).__name__} "
        "(optsched.formats.read_problem reads every kind)"
    )


def from_tree(tree: Any, name: str) -> Problem:
    """Return the problem of a parsed JSON document."""
    if not isinstance(tree, dict):
        raise InputError(f"{name}: expected a JSON object, got {format_json(tree)}")
    family = str(tree.get("format", "")).partition("/")[0]
    if family == "optsched.schedule":
        return document.from_tree(tree, name).graph()
    if family in _COMMANDS:
        raise InputError(
            f"{name}: not an instance, but {format_json(tree['format'])}: "
            f"`optsched {_COMMANDS[family]} {name}` reads it"
        )
    problem: Problem
    if family in DOCUMENTS:
        problem = import_module(DOCUMENTS[family]).from_tree(tree, name)
        return problem
    check_kin(tree, name)
    source = Source(name, "", tree)
    if reader := _recognised(source):
        problem = reader.read(source)
        return problem
    found = f"format {format_json(tree['format'])}" if "format" in tree else "no known keys"
    raise InputError(
        f"{name}: not an instance this optsched reads ({found}): readable are {READABLE}"
    )


def _recognised(source: Source) -> Reader | None:
    return next((reader for reader in readers().values() if reader.recognises(source)), None)
