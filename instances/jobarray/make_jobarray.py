"""Write the job-array instances of this folder: same version, same bytes.

    python instances/jobarray/make_jobarray.py [FOLDER]

Four models by the analytic cost model of `optsched.pipelines.profiles`, batch sizes in equal shares
shuffled by seed. Families: plain (unlimited memory), 80GB (devices of that size, all jobs
recompute), switches (naive partition, mixed links, job switches take time), flight (memory for the
activations that 1F1B keeps, and no more).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from optsched.pipelines.generator import job_array

if TYPE_CHECKING:
    from optsched import JobArray

MODELS = ("vgg19", "resnet152", "bert_large", "gpt2_xl")
SIZES = ((8, 4), (8, 8), (30, 8))  # jobs, devices
SEED = 1


def instances() -> list[JobArray]:
    """All instances of this folder."""
    made = []
    for model in MODELS:
        for jobs, stages in SIZES:
            name = f"{model}-{jobs}x{stages}"
            plain = job_array(model, stages, jobs, seed=SEED, name=name)
            made.append(plain)
            made.append(
                job_array(
                    model, stages, jobs, seed=SEED, memory="80GB", recompute=True,
                    name=f"{name}-80GB",
                )
            )  # fmt: skip
        jobs, stages = SIZES[-1]
        name = f"{model}-{jobs}x{stages}"
        made.append(
            job_array(
                model, stages, jobs, seed=SEED, partition="naive", link="mixed", switch=True,
                name=f"{name}-switches",
            )
        )  # fmt: skip
        made.append(
            job_array(model, stages, jobs, seed=SEED, in_flight=True, name=f"{name}-flight")
        )
    return made


def main() -> None:
    """Write every instance into the folder given, or the one of this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for array in instances():
        array.write(folder / f"{array.name}.jobarray.json")


if __name__ == "__main__":
    main()
