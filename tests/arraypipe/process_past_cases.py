"""Cases of `process_cases` whose ranks remember few blocks, each another number."""

from __future__ import annotations

from typing import Any

import process_cases
import torch.distributed as dist
from process_cases import MAKERS, PROCESSES, Row, compared, main, patched, trainer

from optsched import verify
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.runtime import inline


def remembered(ranks: int, swaps: bool, most: int) -> dict[str, Any]:
    """Jobs of which one stops, with others that wait for seats or not; what is left of the run."""
    rows = [Row(j, optimizer=list(MAKERS)[j % 2]) for j in range(5 if swaps else 2)]
    array = trainer(rows)

    def on_step(job: Job, step: int, loss: float) -> None:
        if (job.seed, step) == (1, 3):
            job.stop()

    place = [1, 0, 1, 0] if ranks == 2 else [2, 0, 3, 1]
    schedule = random_schedule([1, 1], 4, place=place, seed=1)
    with patched(inline, "MOST", most * (1 + dist.get_rank())):
        result = array.run(schedule, 12, queue=swaps, on_step=on_step, **PROCESSES)
    trace, blocks = result.trace, result.replay.n_operations
    return {
        "differences": compared(result, rows, [4 if j == 1 else 12 for j in range(len(rows))]),
        "violations": [*map(str, verify(trace)), *map(str, verify(result.replay))],
        "left out": [d.provenance.get("blocks_left_out", 0) for d in (trace, result.replay)],
        "reported": [result.report.left_out, result.report.cycles],
        "blocks": blocks,
    }


process_cases.remembered = remembered  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
