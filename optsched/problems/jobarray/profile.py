"""Which times a job array gets: those of a measured profile, or of the analytic cost model."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.problems.jobarray.checks import known_options
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profiling.document import Profile
    from optsched.pipelines.models import Model

DIRECT_OPTIONS: Final = (
    "objective", "recompute_as_block", "update_mode", "update_blocks_gradient",
    "microbatch_order", "switch_on", "trailing_switch", "names", "name", "multiplicity", "release",
    "devices", "servers",
)  # fmt: skip


def from_profile(
    model: str | os.PathLike[str] | Model | Profile,
    stages: int | None,
    batch_sizes: Sequence[int] | None,
    options: dict[str, Any],
) -> JobArray:
    """See `JobArray.from_profile`."""
    # names of models have no separators, so a path is told by one
    if isinstance(model, os.PathLike) or (
        isinstance(model, str) and (model.endswith(".profile.json") or os.sep in model)
    ):
        from optsched.arraypipe.profiling.document import Profile

        model = Profile.read(model)
    if problem := getattr(model, "problem", None):
        for key, value in (("stages", stages), ("batch_sizes", batch_sizes)):
            if value is not None:
                raise InputError(f"{key}: settled by the profile; leave it out")
        array: JobArray = problem(**options)
        return array
    from optsched.pipelines.profiles import job_array_fields

    ours = {key: options.pop(key) for key in list(options) if key in DIRECT_OPTIONS}
    known_options(options, signature(job_array_fields).parameters, DIRECT_OPTIONS)
    fields = job_array_fields(model, stages, batch_sizes, **options)  # type: ignore[arg-type]
    return JobArray(**{**fields, **ours})
