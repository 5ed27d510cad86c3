"""The instances published with ArrayPipe, as JSON: one F and one B block per job and stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.formats.registry import Reader
from optsched.io.strict_json import MAX_INTEGER, decode, placed
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from optsched.formats.registry import Source
    from optsched.problems.jobarray.problem import JobArray


class _Job(msgspec.Struct, forbid_unknown_fields=True):
    route: list[Count]
    dur: list[Count]


class _Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    jobs: Annotated[list[_Job], msgspec.Meta(min_length=1)]
    n_stages: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
    n_jobs: Count | None = None
    source: str = ""
    header_jobs: Count | None = None
    header_machines: Count | None = None
    fb_pipeline: bool = True
    flags: list[str] = []
    distinct_jobs: Count | None = None


def from_tree(tree: Any, name: str) -> JobArray:
    """Make the job array of a parsed document: no lags, switches or memory are published.

    ``jobs[].route`` is the device of every block in chain order, 0..S-1 and back, ``jobs[].dur``
    their times in that order.
    """
    from optsched.problems.jobarray.problem import JobArray

    found = decode(tree, _Document, name)
    stages = found.n_stages
    if found.n_jobs is not None and found.n_jobs != len(found.jobs):
        raise InputError(f"{name}: n_jobs: {found.n_jobs}, but there are {len(found.jobs)} jobs")
    forward, backward = [], []
    for j, job in enumerate(found.jobs):
        for key, values in (("route", job.route), ("dur", job.dur)):
            if len(values) != 2 * stages:
                raise InputError(
                    f"{name}: jobs[{j}].{key}: expected {2 * stages} values "
                    f"({stages} stages forward and back), got {len(values)}"
                )
        for b, device in enumerate(job.route):
            expected = min(b, 2 * stages - 1 - b)
            if device != expected:
                raise InputError(
                    f"{name}: jobs[{j}].route[{b}]: expected device {expected} "
                    f"(0..{stages - 1}, then back), got {device}"
                )
        forward.append(job.dur[:stages])
        backward.append(job.dur[stages:][::-1])
    with placed(f"{name}: "):
        return JobArray(np.array(forward), np.array(backward), name=found.name)


def _recognises(source: Source) -> bool:
    keys = source.tree.keys() if isinstance(source.tree, dict) else set()
    return "format" not in keys and {"jobs", "n_stages"} <= keys


READER = Reader("arraypipe", _recognises, lambda source: from_tree(source.tree, source.file))
