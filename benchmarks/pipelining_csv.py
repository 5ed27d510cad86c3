"""CPU times of writing and reading a PyTorch pipelining CSV (medians, warm).

python benchmarks/pipelining_csv.py [--ranks 8] [--micro-batches 64] [--repeat 21]

1F1B with whole and with split backwards. Writing: document in memory to padded text. Reading: text
to a schedule with start times; the graph of the job is built once before.
"""

from __future__ import annotations

import argparse

from machine import machine
from speed import milliseconds

from optsched import JobArray, verify
from optsched.formats import pipelining_csv
from optsched.pipelines import one_f_one_b


def main() -> None:
    """Print one line per kind of job."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--micro-batches", type=int, default=64)
    options.add_argument("--repeat", type=int, default=21)
    given = options.parse_args()
    print(machine("numpy"))
    for name, weight in (("F and B", None), ("F, I and W", 1)):
        job = JobArray(
            [[1] * given.ranks], [[2] * given.ranks], weight=weight,
            micro_batches=given.micro_batches,
        )  # fmt: skip
        schedule = one_f_one_b(job)
        text = pipelining_csv.to_csv(schedule)
        again = pipelining_csv.from_text(text, "order.csv", job)
        assert verify(again) == [] and again.sequences == schedule.sequences
        write = milliseconds(lambda s=schedule: pipelining_csv.to_csv(s), given.repeat)
        read = milliseconds(
            lambda t=text, j=job: pipelining_csv.from_text(t, "order.csv", j), given.repeat
        )
        print(
            f"{given.ranks} ranks x {given.micro_batches} micro-batches, {name:10} "
            f"{len(schedule.kind):6,} blocks: write {write:6.1f} ms, read {read:6.1f} ms"
        )


if __name__ == "__main__":
    main()
