"""`Profile`: measured times and bytes of the blocks of a job array, ``optsched.profile/2``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import msgspec

from optsched.errors import InputError
from optsched.io.strict_json import (
    MAX_INTEGER,
    decode_document,
    format_json,
    lines,
    placed,
    read_json,
    rows,
)
from optsched.io.text import aligned, bytes_text, duration
from optsched.io.values import integer
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from optsched.problems.jobarray.problem import JobArray


FORMAT: Final = "optsched.profile/2"
NOISY: Final = 0.25
"""IQR over median above which times are doubtful."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Precision = Literal["fp64", "fp32", "bf16", "amp-bf16", "amp-fp16"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all entries of the document; immutable."""


class DeviceEntry(Entry, frozen=True, kw_only=True):
    """Provenance: device, software and date of the measurement; `memory_bytes` 0 = unknown."""

    name: Text
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count = 0
    threads: Positive
    torch: Text
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d", max_length=200)]
    optsched: Text


class StageEntry(Entry, frozen=True, kw_only=True):
    """Bytes of a stage.

    `state` of every job: its parameters, moments of the optimizer and buffers, without the
    `shared_bytes` of frozen tensors that all jobs use and that exist once on the device.
    """

    name: Text
    parameters_bytes: Count
    gradients_bytes: Count
    shared_bytes: Count = 0
    state: tuple[Count, ...]


class ProfiledJob(Entry, frozen=True, kw_only=True):
    """A job that was profiled.

    `optimizer` is its class with the settings that change its cost; jobs with the same one share
    the times of their updates.
    """

    name: Text
    batch_size: Positive
    microbatches: Positive = 1
    recompute: bool = False
    precision: Precision = "fp32"
    optimizer: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    update: Literal["fused", "block", "global"] = "fused"

    @property
    def batch(self) -> int:
        """Size of its largest micro-batch."""
        return -(-self.batch_size // self.microbatches)


class Times(Entry, frozen=True, kw_only=True):
    """Nanoseconds of one block, measured `n` times."""

    n: Positive
    median_ns: Positive
    iqr_ns: Count
    minimum_ns: Count

    @property
    def spread(self) -> float:
        """IQR over median."""
        return self.iqr_ns / self.median_ns


class BlockEntry(Entry, frozen=True, kw_only=True):
    """Times and bytes of the blocks of a stage; `batch` is the micro-batch size.

    `backward` is the whole backward pass. With a split one, `input_gradient` (kind I) and `weight`
    (kind W) are measured too, and `weight_bytes` stay from I to W. Kept from F to B are
    `saved_bytes` without and `input_bytes` with recomputation; `output_bytes` leave the stage and
    `gradient_bytes` come back.
    """

    stage: Count
    batch: Positive
    dtype: Precision
    forward: Times
    backward: Times
    recompute: Times
    input_gradient: Times | None = None
    weight: Times | None = None
    saved_bytes: Count
    input_bytes: Count
    weight_bytes: Count = 0
    output_bytes: Count
    gradient_bytes: Count

    @property
    def times(self) -> list[Times]:
        """Those of all its kinds that were measured."""
        rows = self.forward, self.backward, self.recompute, self.input_gradient, self.weight
        return [times for times in rows if times is not None]


class UpdateEntry(Times, frozen=True, kw_only=True):
    """Times of the update of a stage by an optimizer."""

    stage: Count
    optimizer: str
    dtype: Precision


class Link(Entry, frozen=True, kw_only=True):
    """Link between devices: bytes per second, and nanoseconds of an empty message."""

    bandwidth: Positive
    latency_ns: Count

    def time_ns(self, size: int) -> float:
        """Nanoseconds of a message of so many bytes."""
        return self.latency_ns + size * 1e9 / self.bandwidth


@dataclass(frozen=True)
class Profile:
    """Measured times and bytes of the blocks of a job array, with provenance; immutable.

    Made by `ArrayTrainer.profile`. Times are medians in nanoseconds; nothing is predicted for
    micro-batch sizes that were not measured.

    Parameters
    ----------
    device
        Device, software and date.
    stages, jobs
        In the order of the trainer's.
    blocks
        One entry per (stage, micro-batch size, dtype).
    updates
        One entry per (stage, optimizer, dtype).
    link
        Bandwidth and latency between devices; None if there was one device.

    Raises
    ------
    InputError
        Entries contradict each other or are missing; the message names the field.
    """

    device: DeviceEntry
    stages: tuple[StageEntry, ...]
    jobs: tuple[ProfiledJob, ...]
    blocks: tuple[BlockEntry, ...]
    updates: tuple[UpdateEntry, ...]
    link: Link | None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a ``*.profile.json`` document strictly; `InputError` names place, rule and value."""
        return read_json(path, from_tree)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the document (whole file or nothing)."""
        from optsched.io.files import write_atomic

        write_atomic(path, to_bytes(self))

    def block(self, stage: int, batch: int, precision: str = "fp32") -> BlockEntry:
        """Times and bytes of a stage at a measured micro-batch size.

        Raises
        ------
        InputError
            The size was not measured in this precision; names the sizes that were.
        """
        found = self._blocks.get((stage, batch, precision))
        if found is None:
            raise InputError(
                f"batch: micro-batches of {batch} samples in {precision} were not measured on "
                f"stage {stage} (sizes: {self.sizes(precision)}); profile them with sizes=[{batch}]"
            )
        return found

    def update(self, stage: int, job: ProfiledJob) -> UpdateEntry:
        """Times of the update of a stage by a job's optimizer."""
        found = self._updates.get((stage, job.optimizer, job.precision))
        if found is None:
            raise InputError(f"job: no update of {job.optimizer!r} in {job.precision} was measured")
        return found

    def sizes(self, precision: str = "fp32") -> list[int]:
        """Measured micro-batch sizes, ascending; empty for a precision that was not measured."""
        return sorted({b.batch for b in self.blocks if b.dtype == precision})

    @cached_property
    def spread(self) -> float:
        """Largest interquartile range over median of all times."""
        blocks = (t for b in self.blocks for t in b.times)
        return max(times.spread for times in (*blocks, *self.updates))

    def problem(self, jobs: Sequence[Any] | None = None, **options: Any) -> JobArray:
        """Make the job array of these times and bytes.

        Times are rounded up to the unit. The executor sends a gradient when the whole block is
        done, update included, so ``update_blocks_gradient`` is on by default.

        Parameters
        ----------
        jobs
            Numbers of profiled jobs, `Job` objects, or `ProfiledJob` entries of measured
            micro-batch sizes. All profiled jobs by default.
        options
            ``memory``: bytes of a device, ``"80GB"``, ``"device"`` (of the profiled one, less 5 %),
            or a list of bytes per device, from which the states of all jobs, their gradients and
            shared tensors are subtracted; None = unlimited. ``link``: a `Link` instead of the
            measured one; without either, messages take no time. ``split_backward``: blocks I and W,
            if measured. Others are those of `JobArray`: ``objective`` (default ``"period"``),
            ``place``, ``recompute_mode`` and ``update_mode`` (default: as the jobs are set),
            ``switch``, ``multiplicity``, ``devices``, ``name``, ...

        Raises
        ------
        InputError
            A size or precision was not measured, or the memory does not hold the states.
        """
        from optsched.arraypipe.profile.problem import job_array

        return job_array(self, jobs, options)

    def standing_bytes(self) -> list[int]:
        """Bytes of every stage held all along: states of all jobs, gradients, shared tensors."""
        from optsched.arraypipe.profile.problem import standing_bytes

        return standing_bytes(self, self.jobs, [stage.state for stage in self.stages])

    def __str__(self) -> str:
        rows = [["stage", "dtype", "size", "F", "B", "R", "kept", "output"]]
        for b in self.blocks:
            times = (duration(t.median_ns) for t in (b.forward, b.backward, b.recompute))
            kept, output = bytes_text(b.saved_bytes), bytes_text(b.output_bytes)
            rows.append([self.stages[b.stage].name, b.dtype, str(b.batch), *times, kept, output])
        scatter = f"times scatter by up to {self.spread:.0%} of the median"
        return "\n".join([repr(self), *aligned(rows, left=2), scatter])

    def __repr__(self) -> str:
        size = f"{len(self.jobs)} jobs, {self.n_stages} stages"
        return f"<Profile: {size} on {self.device.name}, {self.device.date}>"

    @cached_property
    def _blocks(self) -> Mapping[tuple[int, int, str], BlockEntry]:
        return {(b.stage, b.batch, b.dtype): b for b in self.blocks}

    @cached_property
    def _updates(self) -> Mapping[tuple[int, str, str], UpdateEntry]:
        return {(u.stage, u.optimizer, u.dtype): u for u in self.updates}


def _check(profile: Profile) -> None:
    """Refuse a profile that lacks a case of its jobs; the message names the field."""
    stages, jobs = range(profile.n_stages), profile.jobs
    for key in ("stages", "jobs"):
        names = [format_json(one.name) for one in getattr(profile, key)]
        if not names:
            raise InputError(f"{key}: expected at least one, got none")
        _complete(key, names, names)
    for s, stage in enumerate(profile.stages):
        if (n := len(stage.state)) != len(jobs):
            raise InputError(
                f"stages[{s}].state: expected one number per job ({len(jobs)}), got {n}"
            )
    for j, job in enumerate(jobs):
        integer(f"jobs[{j}].microbatches", job.microbatches, 1, job.batch_size)
    block = "stage {} at micro-batch {} in {}".format
    sizes = {(b.batch, b.dtype): None for b in profile.blocks}
    sizes |= {(job.batch, job.precision): None for job in jobs}
    found = [block(b.stage, b.batch, b.dtype) for b in profile.blocks]
    _complete("blocks", found, [block(s, *size) for s in stages for size in sizes])
    update = "stage {} by {} in {}".format
    found = [update(u.stage, u.optimizer, u.dtype) for u in profile.updates]
    needed = [update(s, job.optimizer, job.precision) for job in jobs for s in stages]
    _complete("updates", found, needed)


def _complete(key: str, found: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse entries that are doubled, unknown or missing."""
    seen: dict[str, int] = {}
    for k, title in enumerate(found):
        if seen.setdefault(title, k) != k:
            raise InputError(f"{key}[{k}]: {title} is also in {key}[{seen[title]}]")
        if title not in needed:
            raise InputError(f"{key}[{k}]: {title}: no such stage or job")
    for title in needed:
        if title not in seen:
            raise InputError(f"{key}: {title} is missing")


def from_tree(tree: Any, name: str = "profile") -> Profile:
    """A profile from parsed JSON; `InputError` names place, rule and value."""
    document = decode_document(tree, _Document, FORMAT, name)
    with placed(f"{name}: "):
        return Profile(*(getattr(document, field.name) for field in fields(Profile)))


def to_bytes(profile: Profile) -> bytes:
    """Canonical JSON: one entry a line."""
    encode = msgspec.json.Encoder(order="sorted").encode
    members: dict[str, Any] = {"format": FORMAT}
    for field in fields(profile):
        value = getattr(profile, field.name)
        members[field.name] = (
            rows(map(encode, value)) if isinstance(value, tuple) else encode(value)
        )
    return lines(members)


_Document: Any = msgspec.defstruct(
    "_Document", [("format", str), *get_type_hints(Profile).items()],
    forbid_unknown_fields=True, kw_only=True,
)  # fmt: skip
