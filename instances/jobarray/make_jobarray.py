"""Write the 80 job-array instances of this folder: same version, same bytes.

    python instances/jobarray/make_jobarray.py [FOLDER]

Four models by the analytic cost model of `optsched.pipelines.profiles`, batch sizes in equal shares
shuffled by seed. The README lists the families.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.pipelines.generator import job_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched import JobArray

MODELS = ("vgg19", "resnet152", "bert_large", "gpt2_xl")
SIZES = ((8, 4), (8, 8), (30, 8))  # jobs, devices
SEED = 1

ROOMS = (
    ("gpt2_xl", 20, 8), ("gpt2_xl", 12, 4), ("bert_large", 16, 8),
    ("bert_large", 30, 4), ("resnet152", 20, 8), ("vgg19", 15, 6),
)  # fmt: skip
FEW = (
    ("vgg19", 4, 8), ("gpt2_xl", 4, 8), ("bert_large", 6, 12),
    ("resnet152", 8, 16), ("gpt2_xl", 8, 24), ("bert_large", 3, 16),
)  # fmt: skip
MANY = (
    ("vgg19", 100, 4), ("resnet152", 100, 8), ("bert_large", 200, 8), ("gpt2_xl", 200, 4),
    ("resnet152", 64, 16), ("bert_large", 64, 24), ("gpt2_xl", 64, 24), ("vgg19", 1000, 4),
)  # fmt: skip
ROLLING = (
    *((model, jobs, 8) for model in MODELS for jobs in (8, 19)),
    ("gpt2_xl", 16, 16), ("bert_large", 30, 16),
)  # fmt: skip


def made(model: str, jobs: int, stages: int, suffix: str = "", **options: Any) -> JobArray:
    """The array MODEL-JOBSxSTAGES[-SUFFIX]."""
    name = f"{model}-{jobs}x{stages}" + f"-{suffix}" * bool(suffix)
    return job_array(model, stages, jobs, seed=SEED, name=name, **options)


def with_room(model: str, jobs: int, stages: int, room: str) -> JobArray:
    """The array in which every device has memory for so many of its largest jobs."""
    array = made(model, jobs, stages, f"room{room}")
    memory = np.ceil(np.max(array.activation, axis=0) * float(room)).astype(int)
    return array.replace(memory=memory.tolist())


def families() -> Iterator[tuple[str, JobArray]]:
    """Yield all instances of this folder, with the names of their families."""
    for model in MODELS:
        for jobs, stages in SIZES:
            yield "profiles", made(model, jobs, stages)
            yield "caps", made(model, jobs, stages, "80GB", memory="80GB", recompute=True)
        yield "links", made(model, 30, 8, "switches", partition="naive", link="mixed", switch=True)
        yield "caps", made(model, 30, 8, "flight", in_flight=True)
        yield "links", made(model, 16, 8, "mixed", partition="naive", link="mixed")
        yield "links", made(model, 16, 8, "slow", link="infiniband", switch=True)
        yield "caps", made(model, 16, 8, "choose", in_flight=True, recompute="choose")
    for room in ("1.5", "2"):
        for model, jobs, stages in ROOMS:
            yield "caps", with_room(model, jobs, stages, room)
    for model, jobs, stages in FEW:
        yield "few", made(model, jobs, stages)
    for model, jobs, stages in MANY:
        yield "many", made(model, jobs, stages)
    for model, jobs, stages in ROLLING:
        yield "rolling", made(model, jobs, stages, "rolling", objective="period")


def main() -> None:
    """Write every instance into the folder given, or the one of this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for _, array in families():
        array.write(folder / f"{array.name}.jobarray.json")


if __name__ == "__main__":
    main()
