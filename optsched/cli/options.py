"""``--option KEY=VALUE``: named options of solvers, and criteria to stop by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Problem
    from optsched.solving.progress import Criterion

HELP = "KEY=VALUE of the solver, VALUE as JSON or plain text; may be repeated."


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """``["threads=1", "mode=failure-directed"]`` as a mapping.

    Raises
    ------
    InputError
        No ``=``, no key, or a key given twice.
    """
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InputError(f"option: expected KEY=VALUE, got {text!r:.60}")
        if key in found:
            raise InputError(f"option: {key} is given twice")
        found[key] = _value(value)
    return found


def criterion(gap: float | None, no_improvement: float | None) -> Criterion | None:
    """What the ``--stop-...`` options say; None if nothing."""
    from optsched.solving.stop import AnyOf, Gap, NoImprovement

    found: list[Criterion] = []
    if gap is not None:
        found.append(Gap(gap))
    if no_improvement is not None:
        found.append(NoImprovement(seconds=no_improvement))
    return AnyOf(*found) if found else None


def with_objective(problem: Problem, objective: str | None) -> Problem:
    """The problem, a job array with another objective if one is named.

    Raises
    ------
    InputError
        The problem has one objective only, or not this one.
    """
    from optsched.problems.jobarray.problem import JobArray

    if objective is None:
        return problem
    if not isinstance(problem, JobArray):
        raise InputError("objective: only job arrays have a choice (makespan or period)")
    return problem.with_objective(objective)


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(text: str) -> None:
    raise ValueError(text)  # NaN is a text like any other
