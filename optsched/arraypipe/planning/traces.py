"""A trace as a plan again: every job's first iteration in it is the first one of a cycle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from optsched.arraypipe.planning.checks import identify
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.arraypipe.planning.checks import Labels
    from optsched.model.schedule import Schedule


def counted_from_zero(schedule: Schedule) -> Schedule:
    """A document whose jobs all begin with iteration 0; periodic ones are given back as they are.

    Iterations of a trace count from the job's seed: those of a run that went on from checkpoints
    begin where each job did, those of a long run where its memory does.
    """
    if schedule.period or not schedule.n_operations:
        return schedule
    jobs, place = np.unique(schedule.job, return_inverse=True)
    first = np.full(len(jobs), np.iinfo(np.int64).max)
    np.minimum.at(first, place, schedule.iteration)
    before = first[place]
    return replace(schedule, iteration=schedule.iteration - before) if before.any() else schedule


def identify_all(schedule: Schedule) -> Labels:
    """The labels of all operations (`identify`); of a trace it says what is wrong with it."""
    try:
        return identify(schedule)
    except InputError as error:
        if "executor" not in schedule.provenance:
            raise
        raise InputError(
            f"{error}; a trace can be run again if every job of the run has blocks in it (a job "
            f"that was complete before has none) and only whole iterations (a job that has failed, "
            f"or whose beginning was left out of a long trace, may have others); here iterations "
            f"count from each job's first"
        ) from error
