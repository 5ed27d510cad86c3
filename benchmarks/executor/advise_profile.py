"""Write a profile of GPT-2 XL from the analytic A100 model: an example for `advise`, not measured.

$ python -m benchmarks.executor.advise_profile instances/profiles/gpt2_xl-4.profile.json
"""

from __future__ import annotations

import argparse

from optsched.arraypipe.profile.document import (
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
from optsched.pipelines.models import model_of
from optsched.pipelines.profiles import BANDWIDTH, HOST, LATENCY, job_array_fields, stages_of

SIZES = (1, 2, 4, 8, 16, 24, 32)
BATCHES = (8, 16, 24, 32)
STAGES = 4
PARAMETER = 4  # bytes; a gradient has as many


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("path")
    analytic().write(parser.parse_args().path)


def analytic() -> Profile:
    """Four jobs of GPT-2 XL with AdamW in four stages, times in whole microseconds."""
    fields = job_array_fields("gpt2_xl", STAGES, SIZES)
    parts = stages_of(model_of("gpt2_xl"), STAGES, SIZES[1])
    jobs = tuple(ProfiledJob(name=f"batch{b}", batch_size=b, optimizer="AdamW") for b in BATCHES)
    names = {"F": "forward", "B": "backward", "R": "recompute"}
    times = [
        (kind, s, size, -1, 1000 * int(fields[names[kind]][k, s]))
        for kind in names
        for s in range(STAGES)
        for k, size in enumerate(SIZES)
    ] + [("U", s, 0, 0, 1000 * int(fields["update"][0, s])) for s in range(STAGES)]
    every = [(s, k, size) for s in range(STAGES) for k, size in enumerate(SIZES)]
    return Profile(
        DeviceEntry(
            name="A100, by an analytic model", kind="cuda", memory_bytes=80 << 30, threads=1,
            torch="none", date="2026-01-01", optsched="0.1.0",
        ),
        tuple(
            StageEntry(
                name=f"{part.layers[0].name}..{part.layers[-1].name}",
                parameters_bytes=PARAMETER * part.params,
                gradients_bytes=PARAMETER * part.params,
                state={job.name: 3 * PARAMETER * part.params for job in jobs},
            )
            for part in parts
        ),
        jobs,
        tuple(
            BlockEntry(
                kind=kind, stage=s, batch=size, job=job, dtype="fp32", n=1, median_ns=time,
                iqr_ns=0, minimum_ns=time,
            )
            for kind, s, size, job, time in times
        ),
        tuple(
            BoundaryEntry(
                stage=s, batch=size, dtype="fp32", bytes=size * parts[s].out_bytes,
                gradient_bytes=size * parts[s].out_bytes,
            )
            for s, _, size in every
        ),
        tuple(
            SavedEntry(
                stage=s, batch=size, dtype="fp32", bytes=int(fields["activation"][k, s]),
                input_bytes=int(fields["checkpoint"][k, s]),
            )
            for s, k, size in every
        ),
        Links(
            activation=Link(bandwidth=BANDWIDTH["nvlink"] * 10**6, latency_ns=1000 * LATENCY),
            host=Link(bandwidth=HOST * 10**6, latency_ns=1000 * LATENCY),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
