"""Write a profile of GPT-2 XL from the analytic A100 model: an example for `advise`, not measured.

$ python -m benchmarks.executor.advise_profile instances/profiles/gpt2_xl-4.profile.json
"""

from __future__ import annotations

import argparse

from optsched.arraypipe.profile.document import (
    BlockEntry,
    DeviceEntry,
    Link,
    Profile,
    ProfiledJob,
    StageEntry,
    Times,
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
    jobs = tuple(ProfiledJob(name=f"batch{b}", batch_size=b, optimizer="AdamW") for b in BATCHES)

    def times(field: str, k: int, stage: int) -> dict[str, int]:
        ns = 1000 * int(fields[field][k, stage])
        return {"n": 1, "median_ns": ns, "iqr_ns": 0, "minimum_ns": ns}

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
                state=(3 * PARAMETER * part.params,) * len(jobs),
            )
            for part in parts
        ),
        jobs,
        tuple(
            BlockEntry(
                stage=s, batch=size, dtype="fp32", forward=Times(**times("forward", k, s)),
                backward=Times(**times("backward", k, s)),
                recompute=Times(**times("recompute", k, s)),
                saved_bytes=int(fields["activation"][k, s]),
                input_bytes=int(fields["checkpoint"][k, s]),
                output_bytes=size * parts[s].out_bytes, gradient_bytes=size * parts[s].out_bytes,
            )
            for s in range(STAGES)
            for k, size in enumerate(SIZES)
        ),
        tuple(
            UpdateEntry(stage=s, optimizer="AdamW", dtype="fp32", **times("update", 0, s))
            for s in range(STAGES)
        ),
        Link(bandwidth=BANDWIDTH["nvlink"] * 10**6, latency_ns=1000 * LATENCY),
    )  # fmt: skip


if __name__ == "__main__":
    main()
