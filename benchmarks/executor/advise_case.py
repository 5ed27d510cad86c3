"""The cases of `advise_cases.py`: stages that compute or sleep, and their measured profiles."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from optsched.arraypipe.profiling.document import (
    BlockEntry,
    BoundaryEntry,
    DeviceEntry,
    Link,
    Links,
    Profile,
    ProfiledJob,
    SavedEntry,
    StageEntry,
)

GB = 1 << 30
REPEATS = 7


@dataclass(frozen=True)
class Case:
    """Equal stages whose forward takes ``base + per * size`` milliseconds, backward twice that."""

    name: str
    stages: int
    devices: int
    batches: tuple[int, ...]
    base: float
    per: float
    state: float = 1.0  # GB per stage and job
    memory: float = 80.0  # GB
    bandwidth: float = 10e9
    kept: float = 0.01  # GB per sample and stage
    compute: bool = False

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes that are measured: 1, 2, 4, ... and the jobs' own."""
        return sorted({1 << k for k in range(max(self.batches).bit_length())} | {*self.batches})

    def fits(self, stages: float, more: float, samples: float) -> bool:
        """Whether a device has room for the state and gradients of one job on so many stages.

        And for as much of `more` stages, and for activations: samples x stages.
        """
        state = (stages + more) * self.state * 4 / 3
        return state + self.kept * samples <= 0.95 * self.memory

    @property
    def sent(self) -> int:
        """Bytes of a boundary per sample."""
        return 1 << 16


CASES = [
    Case("fits, as many jobs as twice the devices", 4, 4, (8,) * 8, 1, 0.5),
    Case("fits, mixed batches, many jobs", 4, 4, (4, 8, 16, 16, 8, 4, 16, 8, 16, 16), 1, 0.4),
    Case("fits, a job for every device, slow links", 4, 4, (8,) * 4, 1, 0.5, 0.5, 80, 1e7),
    Case("fits, mixed batches, slow links", 4, 4, (4, 8, 8, 8, 4, 8, 8), 1, 0.4, 0.5, 80, 1e7),
    Case("fits, one device", 4, 1, (8, 16, 8), 1, 0.3),
    Case("too large for one, as many jobs as stages", 4, 4, (4,) * 4, 5, 0.2, 6, 30),
    Case("too large for one, 8 stages, batches of 1", 8, 8, (1,) * 8, 5, 0.5, 4, 40),
    Case("too large for one, mixed small batches", 4, 4, (2, 4, 4, 3), 6, 0.2, 6, 30),
    Case("too large for one, more jobs than stay", 4, 4, (2, 4, 4, 8, 2, 4, 8, 8), 6, 0.2, 6, 30),
    Case("too large for one, one job, large batch", 4, 4, (64,), 0.3, 0.5, 12, 30),
    Case("too large for one, two jobs, large batches", 4, 4, (64, 64), 0.2, 0.3, 12, 30),
    Case("states of all do not fit, large batches", 4, 4, (32,) * 6, 0.2, 0.3, 12, 30),
    Case("one job, many devices, fast links, small weights", 4, 4, (64,), 0.2, 0.5, 0.01, 80, 4e11),
    Case("fits, fewer jobs than devices, slow links", 4, 4, (64, 64), 0.2, 0.4, 1, 80, 1e9),
    Case("compute blocks, fits", 4, 4, (16,) * 8, 256, 1, compute=True),
    Case("compute blocks, too large for one", 4, 4, (1,) * 4, 256, 1, 6, 30, compute=True),
]


def measured(case: Case) -> Profile:
    """The profile of a case: medians of blocks that really ran here."""
    blocks = []
    for size in case.sizes:
        for kind, times in (("F", 1), ("B", 2), ("R", 1)):
            found = sorted(_timed(case, size, times) for _ in range(REPEATS))
            quarters = statistics.quantiles(found, n=4)
            blocks += [
                BlockEntry(
                    kind=kind, stage=s, batch=size, dtype="fp32", n=REPEATS,
                    median_ns=round(statistics.median(found)),
                    iqr_ns=round(quarters[2] - quarters[0]), minimum_ns=found[0],
                )
                for s in range(case.stages)
            ]  # fmt: skip
    state = int(case.state * GB)
    jobs = tuple(ProfiledJob(name=f"job{j}", batch_size=b) for j, b in enumerate(case.batches))
    for s in range(case.stages):
        blocks.append(
            BlockEntry(kind="U", stage=s, batch=0, job=0, dtype="fp32", n=1, median_ns=1_000,
                       iqr_ns=0, minimum_ns=1_000)
        )  # fmt: skip
    every = [(s, size) for s in range(case.stages) for size in case.sizes]
    return Profile(
        DeviceEntry(name="sleep", kind="cpu", threads=1, torch="-", date="2026-01-01",
                    optsched="-"),
        tuple(
            StageEntry(name=f"stage{s}", parameters_bytes=state // 3, gradients_bytes=state // 3,
                       state={job.name: state for job in jobs})
            for s in range(case.stages)
        ),
        jobs,
        tuple(blocks),
        tuple(
            BoundaryEntry(stage=s, batch=b, dtype="fp32", bytes=case.sent * b,
                          gradient_bytes=case.sent * b)
            for s, b in every
        ),
        tuple(
            SavedEntry(stage=s, batch=b, dtype="fp32", bytes=int(case.kept * GB * b),
                       input_bytes=case.sent * b)
            for s, b in every
        ),
        Links(activation=Link(bandwidth=int(case.bandwidth), latency_ns=20_000),
              host=Link(bandwidth=25_000_000_000, latency_ns=20_000)),
    )  # fmt: skip


def _timed(case: Case, size: int, times: int) -> int:
    begin = time.perf_counter_ns()
    if case.compute:
        width = int(case.base)
        matrix, rows = np.ones((width, width), np.float32), np.ones((16 * size, width), np.float32)
        for _ in range(8 * times):
            rows = rows @ matrix * np.float32(1 / width)
    else:
        time.sleep(times * (case.base + case.per * size) / 1e3)
    return time.perf_counter_ns() - begin


# the alternatives


def until(moment: float) -> None:
    """Sleep until a moment of the clock."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
