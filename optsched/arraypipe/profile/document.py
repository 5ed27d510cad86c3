"""`Profile`, what the blocks of a job array take, and its document ``optsched.profile/1``."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

from optsched.arraypipe.profile.curve import Curve
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
from optsched.io.values import integer, one_of
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


FORMAT: Final = "optsched.profile/1"
NOISY: Final = 0.25
"""IQR over median from which on a case is measured more often, and then warned about."""

KINDS: Final = {"F": "forward", "B": "backward", "R": "recompute", "U": "update"}
_BYTES: Final = ("saved", "input", "output", "gradient")
_HASH = re.compile("[0-9a-f]{16,64}")
_HASH_IN_NAME = re.compile(r"(?:^| )profile ([0-9a-f]{16})$")

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Precision = Literal["fp64", "fp32", "bf16"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the document; it never changes."""


class DeviceEntry(Entry, frozen=True, kw_only=True):
    """Where and when it was measured; `memory_bytes` 0 = not known.

    `block_overhead_ns` is what the executor adds to every block, messages included; 0 on a GPU,
    where the host is ahead of the device.
    """

    name: Text
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count = 0
    threads: Positive
    block_overhead_ns: Count = 0
    torch: Text
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d", max_length=200)]
    optsched: Text


class StageEntry(Entry, frozen=True, kw_only=True):
    """Bytes of a stage; `state` of every job: parameters, moments of the optimizer and buffers."""

    name: Text
    parameters_bytes: Count
    gradients_bytes: Count
    state: tuple[Count, ...]


class ProfiledJob(Entry, frozen=True, kw_only=True):
    """A job that was profiled.

    `optimizer` is its class and the settings that change its cost; jobs with the same one share
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
    """Nanoseconds of one block, measured `n` times.

    `launch_ns` is what the host needs to launch it on a GPU, 0 on a CPU.
    """

    n: Positive
    median_ns: Positive
    iqr_ns: Count
    minimum_ns: Count
    launch_ns: Count = 0

    @property
    def spread(self) -> float:
        """IQR over median."""
        return self.iqr_ns / self.median_ns

    @property
    def noisy(self) -> bool:
        """Whether the spread makes the median doubtful."""
        return self.spread > NOISY


class BlockEntry(Entry, frozen=True, kw_only=True):
    """Times and bytes of the blocks of a stage; `batch` is the micro-batch size.

    Kept from F to B are `saved_bytes` without and `input_bytes` with recomputation; the output
    leaves the stage, and the gradient comes back for it.
    """

    stage: Count
    batch: Positive
    dtype: Precision
    forward: Times
    backward: Times
    recompute: Times
    saved_bytes: Count
    input_bytes: Count
    output_bytes: Count
    gradient_bytes: Count


class UpdateEntry(Times, frozen=True, kw_only=True):
    """Times of the update of a stage by an optimizer."""

    stage: Count
    optimizer: str
    dtype: Precision


class Link(Entry, frozen=True, kw_only=True):
    """A way that bytes go: bytes per second, and nanoseconds of an empty message."""

    bandwidth: Positive
    latency_ns: Count

    def time_ns(self, size: int) -> float:
        """Nanoseconds of a message of so many bytes."""
        return self.latency_ns + size * 1e9 / self.bandwidth


class Links(Entry, frozen=True, kw_only=True):
    """From device to device, and from the host's memory to a device."""

    activation: Link
    host: Link


class Duration(NamedTuple):
    """A median in nanoseconds, and whether it was predicted from other sizes."""

    median_ns: int
    predicted: bool


@dataclass(frozen=True)
class Profile:
    """What the blocks of a job array take and keep, with provenance; immutable.

    Made by `ArrayTrainer.profile`; the way from a model to a `JobArray` (`problem`). Times are in
    nanoseconds: medians; the minima are for the record and nothing is predicted from them.

    Parameters
    ----------
    device
        Where, when and with which versions it was measured.
    stages, jobs
        In the order of the trainer's.
    blocks
        One entry per (stage, micro-batch size, dtype).
    updates
        One entry per (stage, optimizer, dtype).
    links
        Bandwidth and latency between devices, and from the host to a device.

    Raises
    ------
    InputError
        Entries contradict each other or are missing; the sentence names the field.
    """

    device: DeviceEntry
    stages: tuple[StageEntry, ...]
    jobs: tuple[ProfiledJob, ...]
    blocks: tuple[BlockEntry, ...]
    updates: tuple[UpdateEntry, ...]
    links: Links

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

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical document; the problem's name carries its beginning."""
        return hashlib.sha256(to_bytes(self)).hexdigest()

    def duration(self, kind: str, stage: int, batch: int, job: int = 0) -> Duration:
        """Time of a block at a micro-batch size, measured or else predicted.

        Parameters
        ----------
        kind
            ``"F"``, ``"B"``, ``"R"`` or ``"U"``.
        stage
            Number of the stage.
        batch
            Micro-batch size; an update does not depend on it.
        job
            Whose precision, and for ``"U"`` whose optimizer.

        Raises
        ------
        InputError
            There is no such kind, stage or job, or the size is below 1.
        """
        one_of("kind", kind, tuple(KINDS))
        integer("stage", stage, 0, self.n_stages - 1)
        integer("batch", batch, 1)
        return self.duration_of(
            kind, stage, batch, self.jobs[integer("job", job, 0, len(self.jobs) - 1)]
        )

    def duration_of(self, kind: str, stage: int, batch: int, job: ProfiledJob) -> Duration:
        """`duration` of a job that need not be one of the profile's."""
        if kind != "U":
            return self._at(kind, stage, batch, job.precision)
        found = self._updates.get((stage, job.optimizer, job.precision))
        if found is None:
            raise InputError(f"job: no update of {job.optimizer!r} in {job.precision} was measured")
        return Duration(found, False)

    def bytes_of(self, what: str, stage: int, batch: int, precision: str) -> int:
        """Bytes at a micro-batch size: ``"output"``, ``"gradient"``, ``"saved"``, ``"input"``."""
        return self._at(what, stage, batch, precision).median_ns

    def sizes(self, precision: str = "fp32") -> list[int]:
        """Measured micro-batch sizes, ascending; empty for a precision that was not measured."""
        return sorted({b.batch for b in self.blocks if b.dtype == precision})

    def extrapolates(self, batch: int, precision: str = "fp32") -> bool:
        """Whether a micro-batch size lies outside the measured ones."""
        sizes = self.sizes(precision)
        return bool(sizes) and not sizes[0] <= batch <= sizes[-1]

    @cached_property
    def fit_error(self) -> float | None:
        """Largest relative error of a measured size that the others predict; None: under three."""
        curves = [c for (what, _, _), c in self._curves.items() if what in KINDS]
        return max((error for c in curves for error in c.left_out()), default=None)

    def cases(self) -> Iterator[tuple[str, Times]]:
        """Everything that was timed, in words: ``F of stage 1 (layer4), micro-batch 8, fp32``."""
        for b in self.blocks:
            where = f"of stage {b.stage} ({self.stages[b.stage].name}), micro-batch {b.batch}"
            for kind in "FBR":
                yield f"{kind} {where}, {b.dtype}", getattr(b, KINDS[kind])
        for u in self.updates:
            where = f"U of stage {u.stage} ({self.stages[u.stage].name})"
            yield f"{where}, {u.optimizer or 'no optimizer'}, {u.dtype}", u

    def noisy(self) -> list[str]:
        """A sentence per case whose IQR is above a quarter of its median, the worst first."""
        return [
            f"{title}: IQR {times.spread:.0%} of the median after {times.n} repeats"
            for title, times in sorted(self.cases(), key=lambda case: -case[1].spread)
            if times.noisy
        ]

    def problem(
        self,
        jobs: Sequence[Any] | None = None,
        *,
        objective: str = "period",
        recompute_mode: str | Sequence[bool] | None = None,
        update_mode: str | None = None,
        memory: str | int | Sequence[int] | None = None,
        place: Sequence[int] | None = None,
        **options: Any,
    ) -> JobArray:
        """The job array of these times and bytes.

        Times are rounded up to the unit. The executor hands a gradient over when the whole block
        is done, update included; so ``update_blocks_gradient`` is on unless asked otherwise.

        Parameters
        ----------
        jobs
            Which jobs: numbers of profiled ones, `Job` objects, or `ProfiledJob` entries of a
            "what if", whose sizes need not have been measured. All profiled ones by default.
        objective
            ``"period"`` (rolling) or ``"makespan"``.
        recompute_mode
            As in `JobArray`; by default as every job is set.
        update_mode
            ``"fused"``, ``"block"`` or ``"global"``; by default ``"global"`` if a job clips
            gradients or has a scheduler that needs a metric, else ``"fused"``.
        memory
            Of a whole device: bytes, ``"80GB"``, ``"device"`` (of the profiled one, less 5 %), or
            one number of bytes per device. The states of all jobs and their gradients are
            subtracted: what is left is for activations. None = unlimited.
        place
            Device of every stage; by default each has its own.
        options
            Others of `JobArray`: ``switch``, ``multiplicity``, ``devices``, ``servers``,
            ``name``, ...

        Returns
        -------
        JobArray
            Its name ends with the beginning of the profile's hash.

        Raises
        ------
        InputError
            A job's precision was not measured, or the memory does not hold the states.
        """
        from optsched.arraypipe.profile.problem import job_array

        options |= {"objective": objective, "update_mode": update_mode, "place": place}
        return job_array(self, jobs, memory, options | {"recompute_mode": recompute_mode})

    def made(self, schedule: Schedule) -> bool:
        """Whether a schedule was made from this very profile.

        Its provenance says so (``profile_sha256``), or its name, which it has from the problem.
        """
        told = _profile_of(schedule)
        return bool(told) and self.sha256.startswith(told)

    def gap(self, schedule: Schedule) -> str:
        """A sentence if a schedule was made from another profile, else nothing.

        Of a schedule that names no profile nothing can be said.
        """
        told = _profile_of(schedule)
        if not told or self.sha256.startswith(told):
            return ""
        return (
            f"the schedule was made with profile {told[:12]}, not with {self.sha256[:12]}: its "
            f"times may be wrong, the report shows by how much; results do not depend on them"
        )

    def __str__(self) -> str:
        from optsched.arraypipe.profile.table import table

        return table(self)

    def __repr__(self) -> str:
        return (
            f"<Profile {self.sha256[:16]}: {len(self.jobs)} jobs, {self.n_stages} stages "
            f"on {self.device.name}>"
        )

    def _at(self, what: str, stage: int, batch: int, precision: str) -> Duration:
        """A measured value as it is; a predicted one rounded up."""
        curve = self._curves.get((what, stage, precision))
        if curve is None:
            raise InputError(f"precision: {precision} was not measured")
        known = dict(curve.points).get(batch)
        return Duration(ceil(curve(batch)) if known is None else known, known is None)

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, str], Curve]:
        points: dict[tuple[str, int, str], list[tuple[int, int]]] = defaultdict(list)
        for b in sorted(self.blocks, key=lambda b: b.batch):
            values = {kind: getattr(b, KINDS[kind]).median_ns for kind in "FBR"}
            values |= {what: getattr(b, f"{what}_bytes") for what in _BYTES}
            for what, value in values.items():
                points[what, b.stage, b.dtype].append((b.batch, value))
        return {key: Curve(row) for key, row in points.items()}

    @cached_property
    def _updates(self) -> Mapping[tuple[int, str, str], int]:
        return {(u.stage, u.optimizer, u.dtype): u.median_ns for u in self.updates}


def _check(profile: Profile) -> None:
    """Refuse a profile that could not answer for all its jobs; the sentence names the field."""
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
        if not profile.sizes(job.precision):
            raise InputError(f"blocks: there are none in {job.precision}, as job {j} needs")
    block = "stage {} at micro-batch {} in {}".format
    sizes = sorted({(b.batch, b.dtype) for b in profile.blocks})
    found = [block(b.stage, b.batch, b.dtype) for b in profile.blocks]
    _complete("blocks", found, [block(s, *size) for s in stages for size in sizes])
    update = "stage {} by {} in {}".format
    found = [update(u.stage, u.optimizer, u.dtype) for u in profile.updates]
    needed = [update(s, job.optimizer, job.precision) for job in jobs for s in stages]
    _complete("updates", found, needed)


def _complete(key: str, found: Sequence[str], needed: Sequence[str]) -> None:
    """Everything that is needed is there, once, and nothing else."""
    seen: dict[str, int] = {}
    for k, what in enumerate(found):
        if seen.setdefault(what, k) != k:
            raise InputError(f"{key}[{k}]: {what} is also in {key}[{seen[what]}]")
        if what not in needed:
            raise InputError(f"{key}[{k}]: {what}: there is no such stage or job")
    for what in needed:
        if what not in seen:
            raise InputError(f"{key}: {what} is missing")


def _profile_of(schedule: Schedule) -> str:
    """The hash, or how it begins, of the profile that a schedule was made from; empty: none."""
    told = schedule.provenance.get("profile_sha256")
    if isinstance(told, str):
        return told if _HASH.fullmatch(told) else ""
    match = _HASH_IN_NAME.search(schedule.name)
    return "" if match is None else match[1]


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
