"""Write a profile of GPT-2 XL from the analytic A100 model: an example for `advise`, not measured.

$ python -m benchmarks.executor.advise_profile instances/profiles/gpt2_xl-4.profile.json
"""

from __future__ import annotations

import argparse

from optsched.arraypipe.profile import (
    BlockEntry,
    DeviceEntry,
    Link,
    Profile,
    ProfiledJob,
    StageEntry,
    UpdateEntry,
)
from optsched.pipelines.models import model_of
from optsched.pipelines.profiles import BANDWIDTH, LATENCY, job_array_fields, stages_of

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
    jobs = tuple(
        ProfiledJob(name=f"batch{b}", batch_size=b, microbatches=b // 4, optimizer="AdamW")
        for b in BATCHES
    )

    def time(field: str, k: int, stage: int) -> int:
        return 1000 * int(fields[field][k, stage])

    return Profile(
        device=DeviceEntry(
            name="A100, by an analytic model", kind="cuda", memory_bytes=80 << 30, threads=1,
            torch="none", date="2026-01-01", optsched="0.1.0",
        ),
        stages=tuple(
            StageEntry(
                name=f"{part.layers[0].name}..{part.layers[-1].name}",
                gradients_bytes=PARAMETER * part.params,
                state=(3 * PARAMETER * part.params,) * len(jobs),
            )
            for part in parts
        ),
        jobs=jobs,
        blocks=tuple(
            BlockEntry(
                stage=s, batch=size, dtype="fp32", forward=time("forward", k, s),
                backward=time("backward", k, s), recompute=time("recompute", k, s),
                saved_bytes=int(fields["activation"][k, s]),
                input_bytes=int(fields["checkpoint"][k, s]),
                output_bytes=size * parts[s].out_bytes, gradient_bytes=size * parts[s].out_bytes,
            )
            for s in range(STAGES)
            for k, size in enumerate(SIZES)
        ),
        updates=tuple(
            UpdateEntry(stage=s, optimizer="AdamW", dtype="fp32", time=time("update", 0, s))
            for s in range(STAGES)
        ),
        link=Link(bandwidth=BANDWIDTH["nvlink"] * 10**6, latency_ns=1000 * LATENCY),
    )  # fmt: skip


if __name__ == "__main__":
    main()
