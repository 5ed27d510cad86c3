"""Job arrays of real models with the batch sizes that sweeps use, by seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.problems.jobarray.checks import MAX_BLOCKS
from optsched.problems.jobarray.problem import JobArray

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
    recompute: bool | str = False,
    switch: bool = False,
    micro_batches: int = 1,
    objective: str = "makespan",
    in_flight: bool = False,
    jitter: float = 0.0,
    times: tuple[int, int] | None = None,
    name: str = "",
) -> JobArray:
    """Make a job array of a real model: equal shares of its usual batch sizes, shuffled.

    Parameters
    ----------
    model, stages, partition, link, memory, switch, micro_batches
        See `optsched.pipelines.profiles.Options`.
    seed
        Shuffles the batch sizes; the same seed gives the same bytes.
    recompute
        Recompute activations in every job; ``"choose"`` leaves it to the solver, job by job.
        With `in_flight` every choice then has room: memory is that for jobs without recomputation.
    in_flight
        Instead of `memory`: stage v of S has room for the S - v largest jobs, as 1F1B needs.
    jitter
        Every block takes up to this share of its time more or less, 0 to 1.
    times
        Instead of the model's times: uniform in this range, both ends included, without lags.
        Bytes stay the model's, so that every stage still needs one of its layers.
    """
    if model not in BATCH_SIZES:
        raise InputError(f"model: expected one of {', '.join(BATCH_SIZES)}, got {model!r:.60}")
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
        "micro_batches": micro_batches, "objective": objective,
        "recompute_mode": recompute if isinstance(recompute, str) else _MODES[recompute],
    }  # fmt: skip
    if in_flight and memory is not None:
        raise InputError("in_flight: give it or memory, not both")
    names = [f"job{j}-b{size}" for j, size in enumerate(sizes)]
    label = name or "-".join([
        f"{model}-{jobs}x{stages}-seed{seed}",
        *([f"m{micro_batches}"] if micro_batches != 1 else []),
        *([partition] if partition != "balanced" else []),
        *([link] if link != "nvlink" else []),
        *([str(memory).replace(" ", "")] if memory is not None else []),
        *(["1f1b"] if in_flight else []),
        *(["choose" if recompute == "choose" else "recompute"] if recompute else []),
        *(["switch"] if switch else []),
        *([f"random{times[0]}:{times[1]}"] if times is not None else []),
        *([f"jitter{jitter:g}"] if jitter else []),
        *([objective] if objective != "makespan" else []),
    ])  # fmt: skip
    array = JobArray.from_profile(model, stages, sizes, names=names, name=label, **options)
    if times is not None:
        array = _random(array, times, seed)
    if jitter:
        array = _jittered(array, jitter, seed)
    if in_flight:
        kept = array.checkpoint if array.recompute_mode == "always" else array.activation
        array = array.replace(memory=kept.max(axis=0) * np.arange(stages, 0, -1))
    return array


_MODES: Final = {False: "never", True: "always"}
MAX_TIME: Final = 10**9  # longest block time that is drawn


def _random(array: JobArray, times: tuple[int, int], seed: int) -> JobArray:
    """Block times uniform in a range; nothing else takes time."""
    least, most = times
    if not 0 <= least <= most <= MAX_TIME:
        raise InputError(f"times: expected 0 <= least <= most <= {MAX_TIME}, got {least}:{most}")
    draw = np.random.default_rng([seed, 1])
    shape = array.forward.shape
    forward, backward = (draw.integers(least, most + 1, shape) for _ in range(2))
    none = dict.fromkeys(("update", "switch", "lag_forward", "lag_backward"), 0)
    return array.replace(forward=forward, backward=backward, recompute=forward, **none)


def _jittered(array: JobArray, jitter: float, seed: int) -> JobArray:
    """Forward and backward times off by up to a share, as measured ones are."""
    if not 0 <= jitter <= 1:
        raise InputError(f"jitter: expected a share, 0 to 1, got {jitter}")
    draw = np.random.default_rng([seed, 2])
    shape = array.forward.shape
    off = {key: 1 + jitter * draw.uniform(-1, 1, shape) for key in ("forward", "backward")}
    times = {key: np.rint(getattr(array, key) * off[key]).astype(np.int64) for key in off}
    return array.replace(**times)
