"""`Profile`: measured times and bytes of a job array, ``optsched.profile/2``, and its problem."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np

from optsched.analysis.occupancy import jobs_that_fit
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
from optsched.io.text import NANOSECONDS, aligned, bytes_text, duration
from optsched.io.values import bytes_of, integer
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)
from optsched.problems.jobarray.checks import row_of

if TYPE_CHECKING:
    import os

    from optsched.problems.jobarray.problem import JobArray


FORMAT: Final = "optsched.profile/2"
RESERVE: Final = 0.05
"""Share of a device's memory that ``memory="device"`` leaves to fragmentation."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Precision = Literal["fp64", "fp32", "bf16", "amp-bf16", "amp-fp16"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all entries of the document; immutable. Times are medians in nanoseconds."""


class DeviceEntry(Entry, frozen=True, kw_only=True):
    """Device, software and date of the measurement; `memory_bytes` 0 = unknown."""

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
    update: Literal["fused", "global"] = "fused"

    @property
    def batch(self) -> int:
        """Size of its largest micro-batch."""
        return -(-self.batch_size // self.microbatches)


class BlockEntry(Entry, frozen=True, kw_only=True):
    """Times and bytes of the blocks of a stage; `batch` is the micro-batch size.

    `backward` is the whole backward pass. With a split one, `input_gradient` (kind I) and `weight`
    (kind W) are measured too. Kept from F to B are `saved_bytes` without and `input_bytes` with
    recomputation; `output_bytes` leave the stage and `gradient_bytes` come back.
    """

    stage: Count
    batch: Positive
    dtype: Precision
    forward: Positive
    backward: Positive
    recompute: Positive
    input_gradient: Positive | None = None
    weight: Positive | None = None
    saved_bytes: Count
    input_bytes: Count
    output_bytes: Count
    gradient_bytes: Count


class UpdateEntry(Entry, frozen=True, kw_only=True):
    """Time of the update of a stage by an optimizer."""

    stage: Count
    optimizer: str
    dtype: Precision
    time: Positive


class Link(Entry, frozen=True, kw_only=True):
    """Link between devices: bytes per second, and nanoseconds of an empty message."""

    bandwidth: Positive
    latency_ns: Count


class Profile(Entry, frozen=True, kw_only=True, dict=True):
    """Measured times and bytes of the blocks of a job array, with provenance; immutable.

    Made by `ArrayTrainer.profile`. Nothing is predicted for micro-batch sizes that were not
    measured. There is one entry of `blocks` per (stage, micro-batch size, dtype), and one of
    `updates` per (stage, optimizer, dtype); `link` is None if there was one device.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from optsched.arraypipe import ArrayTrainer, Job
    >>> jobs = [Job(0, 4, torch.optim.SGD), Job(1, 8, torch.optim.SGD)]
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> rows = [(torch.ones(2), torch.zeros(2))] * 8
    >>> trainer = ArrayTrainer(model, rows, stages=2, loss=nn.MSELoss()).with_jobs(jobs)
    >>> profile = trainer.profile()
    >>> profile.sizes(), profile.problem().n_jobs
    ([4, 8], 2)
    """

    format: str = FORMAT
    device: DeviceEntry
    stages: tuple[StageEntry, ...]
    jobs: tuple[ProfiledJob, ...]
    blocks: tuple[BlockEntry, ...]
    updates: tuple[UpdateEntry, ...]
    link: Link | None

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
        """Return times and bytes of a stage at a measured micro-batch size.

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

    def sizes(self, precision: str = "fp32") -> list[int]:
        """Return measured micro-batch sizes, ascending; none of an unmeasured precision."""
        return sorted({b.batch for b in self.blocks if b.dtype == precision})

    def problem(
        self,
        jobs: Sequence[Any] | None = None,
        *,
        memory: str | int | None = None,
        link: Link | None = None,
        split_backward: bool = False,
        **options: Any,
    ) -> JobArray:
        """Make the job array of these times and bytes.

        Times are rounded up to the unit. The executor sends a gradient when the whole block is
        done, update included, so ``update_blocks_gradient`` is on by default.

        Parameters
        ----------
        jobs
            Numbers of profiled jobs, or `Job` objects of measured micro-batch sizes. All profiled
            jobs by default.
        memory
            Bytes of a device, ``"80GB"``, or ``"device"`` (of the profiled one, less 5 %); the
            states of all jobs, gradients and shared tensors are subtracted. None = unlimited.
        link
            Instead of the measured one; without either, messages take no time.
        split_backward
            Blocks I and W, if measured.
        options
            Those of `JobArray`: ``objective`` (default ``"period"``), ``place``,
            ``recompute_mode`` and ``update_mode`` (default: as the jobs are set), ``switch``,
            ``multiplicity``, ``devices``, ``name``, ...

        Raises
        ------
        InputError
            A size or precision was not measured, or the memory does not hold the states.
        """
        from optsched.problems.jobarray.problem import JobArray

        picked, states = self.chosen(jobs)
        place = row_of("place", options.pop("place", None) or range(self.n_stages), self.n_stages)
        settled = self._measured(picked, place, link or self.link, split_backward) | {
            "place": place,
            "state": states,
            "micro_batches": [job.microbatches for job in picked],
            "batch_size": [job.batch_size for job in picked],
            "names": [job.name for job in picked],
        }
        again = options.pop("recompute_mode", None) or [job.recompute for job in picked]
        if split_backward:
            keeps = np.array([again == "never"] if isinstance(again, str) else np.invert(again))
            saved, inputs = settled["activation"], settled["checkpoint"]
            settled["weight_memory"] = np.where(keeps[:, None], saved, np.minimum(saved, inputs))
        if memory is not None:
            settled["memory"] = self._memory_left(memory, picked, states, place)
        for key in options.keys() & {*settled, "weight", "weight_memory"}:
            raise InputError(f"{key}: settled by the profile; change it with problem().replace")
        given: dict[str, Any] = {
            "objective": "period",
            "update_blocks_gradient": True,
            "name": f"{len(picked)}x{self.n_stages}",
            **options,
            "update_mode": _update_mode(picked, options.get("update_mode")),
            "recompute_mode": again,
        }
        return JobArray(**given | settled)

    def chosen(self, jobs: Sequence[Any] | None) -> tuple[list[ProfiledJob], list[tuple[int, ...]]]:
        """Return the jobs, with distinct names, and the bytes of the state of each by stage.

        A `Job` has the optimizer and state of the profiled job of its name in its precision, else
        of the first in that precision.
        """
        if jobs is None:
            jobs = range(len(self.jobs))
        if isinstance(jobs, (str, bytes)) or not isinstance(jobs, Sequence) or not len(jobs):
            raise InputError(f"jobs: expected a list of jobs or their numbers, got {jobs!r:.60}")
        picked: list[ProfiledJob] = []
        states = []
        for k, given in enumerate(jobs):
            if isinstance(given, (int, np.integer)):
                like = integer(f"jobs[{k}]", given, 0, len(self.jobs) - 1)
                job = self.jobs[like]
            elif hasattr(given, "needs_norm"):
                name = given.name or f"job{k}"
                same = [j for j, one in enumerate(self.jobs) if one.precision == given.precision]
                if not same:
                    raise InputError(f"jobs[{k}].precision: {given.precision} was not measured")
                like = next((j for j in same if self.jobs[j].name == name), same[0])
                job = msgspec.structs.replace(
                    self.jobs[like], name=name, batch_size=given.batch_size,
                    microbatches=given.microbatches, recompute=given.recompute,
                    update="global" if given.needs_norm else self.jobs[like].update,
                )  # fmt: skip
            else:
                raise InputError(f"jobs[{k}]: expected a job or its number, got {given!r:.60}")
            copies = sum(one.name.partition(" (")[0] == job.name for one in picked)
            name = f"{job.name} ({copies + 1})" if copies else job.name
            picked.append(msgspec.structs.replace(job, name=name))
            states.append(tuple(stage.state[like] for stage in self.stages))
        return picked, states

    def _measured(
        self, jobs: Sequence[ProfiledJob], place: Sequence[int], link: Link | None, split: bool
    ) -> dict[str, Any]:
        """Return times, lags and bytes; shape (K, S) or (K, S - 1)."""
        stages = range(self.n_stages)
        table = [[self.block(s, job.batch, job.precision) for s in stages] for job in jobs]

        def column(key: str) -> Any:
            return np.array([[getattr(b, key) for b in row] for row in table], np.int64)

        times = {key: column(key) for key in ("forward", "backward", "recompute")}
        if split:
            if any(b.weight is None or b.input_gradient is None for row in table for b in row):
                raise InputError("split_backward: the profile has no times of blocks I and W")
            times |= {"backward": column("input_gradient"), "weight": column("weight")}
        times["update"] = np.array(
            [[self._updates[s, job.optimizer, job.precision] for s in stages] for job in jobs]
        )
        unit = "us" if min(row.min() for row in times.values()) >= 100_000 else "ns"
        found: dict[str, Any] = {key: -(-row // NANOSECONDS[unit]) for key, row in times.items()}
        crossing = np.array(place[1:]) != np.array(place[:-1])
        for key, sent in (("lag_forward", "output_bytes"), ("lag_backward", "gradient_bytes")):
            found[key] = np.zeros((len(jobs), len(crossing)), np.int64)
            if link is not None:
                time_ns = link.latency_ns + column(sent)[:, :-1] * 1e9 / link.bandwidth
                found[key] = np.ceil(crossing * time_ns / NANOSECONDS[unit]).astype(np.int64)
        saved, inputs = column("saved_bytes"), column("input_bytes")
        found |= {"activation": saved, "checkpoint": inputs, "time_unit": unit}
        found["recompute_workspace"] = np.maximum(saved - inputs, 0)
        return found

    def standing_bytes(
        self,
        jobs: Sequence[ProfiledJob] | None = None,
        states: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Return bytes that stages always hold: states of all jobs, gradients, shared tensors.

        With one micro-batch and a fused update a gradient lives in its block only, so that a stage
        holds one at a time. `jobs` and `states` are those of `chosen`.
        """
        if jobs is None or states is None:
            jobs, states = self.chosen(None)
        in_turn = all(job.microbatches == 1 and job.update != "global" for job in jobs)
        gradients = 1 if in_turn else len(jobs)
        return [
            sum(held) + gradients * stage.gradients_bytes + stage.shared_bytes
            for stage, held in zip(self.stages, zip(*states, strict=True), strict=True)
        ]

    def _memory_left(
        self,
        memory: str | int,
        jobs: Sequence[ProfiledJob],
        states: Sequence[Sequence[int]],
        place: Sequence[int],
    ) -> list[int]:
        """Return bytes left for activations on every device; refuses a device that is too small."""
        count, known = 1 + max(place), self.device.memory_bytes
        if memory == "device" and not known:
            raise InputError(
                f"memory: that of {self.device.name} is unknown; give bytes, or a size such as "
                '"80GB"'
            )
        limit = int(known * (1 - RESERVE)) if memory == "device" else bytes_of(memory)

        def held(n: int, device: int) -> int:
            standing = self.standing_bytes(jobs[:n], states[:n])
            return sum(size for size, d in zip(standing, place, strict=True) if d == device)

        n = len(jobs)
        left = [limit - held(n, d) for d in range(count)]
        if min(left) <= 0:  # 0 would read as unlimited
            d = left.index(min(left))
            fit = jobs_that_fit(n, lambda n: held(n, d) < limit)
            raise InputError(
                f"memory: device {d} has {limit} bytes, the states of {n} jobs and their "
                f"gradients take {limit - left[d]}; at most {fit} jobs would fit"
            )
        return left

    def __str__(self) -> str:
        table = [["stage", "dtype", "size", "F", "B", "R", "kept", "output"]]
        for b in self.blocks:
            times = map(duration, (b.forward, b.backward, b.recompute))
            kept, output = bytes_text(b.saved_bytes), bytes_text(b.output_bytes)
            table.append([self.stages[b.stage].name, b.dtype, str(b.batch), *times, kept, output])
        return "\n".join([repr(self), *aligned(table, left=2)])

    def __repr__(self) -> str:
        size = f"{len(self.jobs)} jobs, {self.n_stages} stages"
        return f"<Profile: {size} on {self.device.name}, {self.device.date}>"

    @cached_property
    def _blocks(self) -> dict[tuple[int, int, str], BlockEntry]:
        return {(b.stage, b.batch, b.dtype): b for b in self.blocks}

    @cached_property
    def _updates(self) -> dict[tuple[int, str, str], int]:
        return {(u.stage, u.optimizer, u.dtype): u.time for u in self.updates}


def _update_mode(jobs: Sequence[ProfiledJob], given: str | None) -> str:
    """``"global"`` if a job needs the gradients of all stages; refuses another given mode then."""
    together = next((job.name for job in jobs if job.update == "global"), None)
    if together is not None and given not in (None, "global"):
        raise InputError(
            f"update_mode: job {together} clips gradients or has a scheduler that needs a "
            f'metric, expected "global", got {format_json(given)}'
        )
    return given or ("fused" if together is None else "global")


def from_tree(tree: Any, name: str = "profile") -> Profile:
    """Return a profile from parsed JSON; `InputError` names place, rule and value."""
    profile = decode_document(tree, Profile, FORMAT, name)
    with placed(f"{name}: "):
        _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """Refuse entries that contradict each other or are missing; the message names the field."""
    n, jobs = profile.n_stages, profile.jobs
    for key in ("stages", "jobs"):
        names = [one.name for one in getattr(profile, key)]
        if not names:
            raise InputError(f"{key}: expected at least one, got none")
        for k, name in enumerate(names):
            if name in names[:k]:
                raise InputError(f"{key}[{k}]: {format_json(name)} is also in {key}")
    for s, stage in enumerate(profile.stages):
        if (found := len(stage.state)) != len(jobs):
            raise InputError(
                f"stages[{s}].state: expected one number per job ({len(jobs)}), got {found}"
            )
    for key, keys in (("blocks", profile._blocks), ("updates", profile._updates)):
        entries = getattr(profile, key)
        for k, entry in enumerate(entries):
            integer(f"{key}[{k}].stage", entry.stage, 0, n - 1)
        if len(keys) < len(entries):
            raise InputError(f"{key}: two of a stage and a case")
    for j, job in enumerate(jobs):
        integer(f"jobs[{j}].microbatches", job.microbatches, 1, job.batch_size)
        for s in range(n):
            with placed(f"jobs[{j}]: "):
                profile.block(s, job.batch, job.precision)
            if (s, job.optimizer, job.precision) not in profile._updates:
                raise InputError(f"jobs[{j}]: no update of stage {s} by {job.optimizer} is there")


def to_bytes(profile: Profile) -> bytes:
    """Return canonical JSON: one entry a line."""
    encode = msgspec.json.Encoder(order="sorted").encode
    members = {key: getattr(profile, key) for key in profile.__struct_fields__}
    return lines({
        key: rows(map(encode, value)) if isinstance(value, tuple) else encode(value)
        for key, value in members.items()
    })  # fmt: skip
