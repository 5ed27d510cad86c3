"""`advise`: what trains these jobs on these devices fastest, and does it fit.

A *round* is one iteration of every job; with `samples` as many as make all jobs see their data
equally often. All times are per round, in the steady state of long training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.arraypipe.advice.alternatives import job_array, one_at_a_time, stacked
from optsched.arraypipe.advice.options import Advice
from optsched.arraypipe.advice.situation import Asked, Situation, rolling_array
from optsched.arraypipe.profile.document import Link, Profile
from optsched.arraypipe.profile.problem import chosen
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number
from optsched.pipelines.profiles import bytes_of
from optsched.problems.jobarray.reports import epoch_multiplicity

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable


MOST_DEVICES: Final = 4096
_MOST_COPIES: Final = 16  # iterations of a job in a round


def advise(
    profile: Profile | str | os.PathLike[str],
    jobs: Sequence[Any] | None = None,
    devices: int | None = None,
    *,
    memory: str | int | None = None,
    link: Mapping[str, float] | None = None,
    fused: Mapping[int, float] | None = None,
    samples: int | None = None,
) -> Advice:
    """Rank ways to train sibling jobs, in seconds per round of all jobs.

    Ranked are one job per GPU, one job at a time through a pipeline (1F1B, interleaved), the job
    array, sharded data parallel (FSDP), and stacked jobs where measured.

    Parameters
    ----------
    profile
        What was measured, or the path of its ``*.profile.json``.
    jobs
        As in `Profile.problem`: numbers of profiled jobs, `Job` objects, or anything with
        ``batch_size``, ``microbatches`` and ``recompute``. All profiled jobs by default.
    devices
        Number of equal devices; by default one per profiled stage.
    memory
        Bytes of a device, or a size such as ``"40GB"``; by default the profiled device's. 5 % are
        left for fragmentation.
    link
        What if the link between devices were another: ``{"bandwidth": bytes per second,
        "latency_ns": nanoseconds}``; what is not named stays as measured.
    fused
        Measured stacks (vmap, HFTA): seconds of one iteration of n jobs at once on one device, by
        n. Without it fusing is not ranked.
    samples
        Of the data set: a round then has iterations of every job in proportion to its epoch.

    Returns
    -------
    Advice
        Its `options` are sorted, `best` is the fastest that fits, `too_close` whether the IQR of
        the profile covers its lead; printing it shows a table.

    Raises
    ------
    InputError
        Naming the argument, its value and what was expected.
    """
    known = profile if isinstance(profile, Profile) else Profile.read(profile)
    situation = _situation(known, jobs, devices, memory, link, samples)
    stacks = None if fused is None else _stacks(fused)
    options = [*one_at_a_time(situation), job_array(situation), stacked(situation, stacks)]
    return Advice(
        tuple(sorted(options, key=lambda option: option.seconds or math.inf)),
        len(situation.jobs),
        situation.devices,
        situation.memory,
        tuple(one.iterations for one in situation.jobs),
        tuple(_notes(situation, link)),
    )


def _situation(
    profile: Profile,
    jobs: Sequence[Any] | None,
    devices: int | None,
    memory: str | int | None,
    link: Mapping[str, float] | None,
    samples: int | None,
) -> Situation:
    """The arguments, checked."""
    described, states = chosen(profile, jobs)
    nameless = [msgspec.structs.replace(job, name="-") for job in described]
    asked = [Asked(job, state, 1) for job, state in zip(nameless, states, strict=True)]
    count = profile.n_stages if devices is None else integer("devices", devices, 1, MOST_DEVICES)
    there = profile.device.memory_bytes if memory is None else bytes_of(memory)
    names = tuple(job.name for job in described)
    made = Situation(profile, names, tuple(asked), count, there, _link(profile, link))
    if samples is None:
        return made
    integer("samples", samples, 1)
    array = rolling_array(
        made, [made.own(one)._replace(microbatches=1) for one in asked],
        batch_size=[one.job.batch_size for one in asked],
    )  # fmt: skip
    copies = epoch_multiplicity(array, samples, _MOST_COPIES).tolist()
    rounds = [one._replace(iterations=n) for one, n in zip(asked, copies, strict=True)]
    return replace(made, jobs=tuple(rounds))


def _link(profile: Profile, given: Mapping[str, float] | None) -> Link:
    """The profile's link between devices, changed as asked."""
    found = profile.links.activation
    least = {"bandwidth": 1, "latency_ns": 0}
    changes = {} if given is None else given
    if not isinstance(changes, Mapping) or not set(changes) <= set(least):
        raise InputError(
            f'link: expected {{"bandwidth": ..., "latency_ns": ...}}, got {format_value(given)}'
        )
    values = {
        key: round(number(f"link.{key}", value, least[key])) for key, value in changes.items()
    }
    return msgspec.structs.replace(found, **values)


def _stacks(fused: Mapping[int, float]) -> dict[int, float]:
    """Measured stacks, checked."""
    if not isinstance(fused, Mapping) or not fused:
        raise InputError(
            f"fused: expected {{n: seconds}} of measured stacks, got {format_value(fused)}"
        )
    return {
        integer("fused: number of jobs", n, 1): number(f"fused[{n}]", seconds, above=True)
        for n, seconds in fused.items()
    }


def _notes(situation: Situation, link: object) -> Iterable[str]:
    """What the numbers rest on."""
    profile = situation.profile
    if not situation.memory:
        yield "device memory is not known, so everything is taken to fit; say memory="
    if situation.devices < situation.n_stages:
        yield f"{situation.n_stages} profiled stages are merged into {situation.devices}"
    sizes = {one.job.batch for one in situation.jobs}
    measured = {n for one in situation.jobs for n in profile.sizes(one.job.precision)}
    if len(measured) == 1 or min(measured) >= min(sizes) > 1:
        yield (
            "no micro-batches smaller than the jobs' own were measured: times of more of them "
            "are predicted; profile smaller sizes to know"
        )
    if profile.device.kind == "cpu" and link is None:
        yield "the link is that of a CPU profile: say link= for devices that you mean"
