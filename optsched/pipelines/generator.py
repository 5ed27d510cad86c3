"""Job arrays of real models with the batch sizes that sweeps use, by seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.problems.jobarray import JobArray
from optsched.problems.jobarray_checks import MAX_BLOCKS

if TYPE_CHECKING:
    from optsched.pipelines.profiles import Link

BATCH_SIZES = {
    "vgg19": (128, 256, 512, 768),
    "resnet152": (128, 256, 512, 768),
    "bert_large": (8, 16, 24, 32),
    "gpt2_xl": (8, 16, 24, 32),
}
"""In equal shares over the jobs, shuffled by seed."""


def job_array(
    model: str,
    stages: int,
    jobs: int,
    *,
    seed: int = 0,
    partition: str = "balanced",
    link: Link | str = "nvlink",
    memory: str | int | None = None,
    recompute: bool = False,
    switch: bool = False,
    micro_batches: int = 1,
    name: str = "",
) -> JobArray:
    """A job array of a real model: equal shares of its usual batch sizes, shuffled.

    Parameters
    ----------
    model, stages, partition, link, memory, switch, micro_batches
        See `optsched.pipelines.profiles.job_array_fields`.
    jobs
        Number of sibling jobs, 1 to 100,000.
    seed
        Shuffles the batch sizes; the same seed gives the same bytes.
    recompute
        Recompute activations in every job.

    Raises
    ------
    InputError
        Naming the argument, the value and the legal range.
    """
    if model not in BATCH_SIZES:
        raise InputError(f"model: expected one of {', '.join(BATCH_SIZES)}, got {model!r}")
    if not 1 <= jobs <= 100_000:
        raise InputError(f"jobs: expected 1..100000, got {jobs}")
    blocks = max(jobs, 1) * max(stages, 1) * max(micro_batches, 1)
    if blocks > MAX_BLOCKS:
        raise InputError(
            f"jobs x micro-batches x stages: expected at most {MAX_BLOCKS}, got {blocks}"
        )
    sizes = [BATCH_SIZES[model][j % 4] for j in range(jobs)]
    random.Random(seed).shuffle(sizes)
    options: dict[str, Any] = {
        "partition": partition, "link": link, "memory": memory, "switch": switch,
        "micro_batches": micro_batches, "recompute_mode": "always" if recompute else "never",
    }  # fmt: skip
    names = [f"job{j}-b{size}" for j, size in enumerate(sizes)]
    label = name or f"{model}-{jobs}x{stages}-seed{seed}"
    return JobArray.from_profile(model, stages, sizes, names=names, name=label, **options)
