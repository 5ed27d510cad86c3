"""Cases of `process_cases` whose ranks have little memory, so that states take turns in slots."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import process_cases
import torch.distributed as dist
from arraypipe_plans import in_turn
from memory_limits import little, moving, needs
from process_cases import PROCESSES, Row, alone, main, patched, trainer
from runs import run

from optsched import InputError, JobArray
from optsched.arraypipe import (
    ArrayTrainer,
    RunConfig,
    random_schedule,
    training_run,
)
from optsched.arraypipe.memory.manager import memory_of
from optsched.arraypipe.train_alone import differences


def tightly() -> Any:
    """Every rank has memory for as few slots as its order allows, or a few more; the memories."""
    draw = random.Random(7 + dist.get_rank())
    return little(lambda: draw.choice([1.0, 1.0, 1.2, 1.6]), grow=True)


def tight(ranks: int, case: str, *arguments: Any) -> dict[str, Any]:
    """Another case in little memory, where most jobs recompute: states may leave at any time."""

    def rows(draw: random.Random, most: int, honest: Any = process_cases.random_rows) -> Any:
        return [row._replace(recompute=draw.random() < 0.8) for row in honest(draw, most)]

    kept = tuple(row._replace(recompute=True) for row in process_cases.CHECKPOINTED)
    with (
        tightly() as made,
        patched(process_cases, "random_rows", rows),
        patched(process_cases, "Row", partial(Row, recompute=True)),
        patched(process_cases, "CHECKPOINTED", kept),
    ):
        answer = getattr(process_cases, case)(ranks, *arguments)
        if isinstance(answer, dict):
            answer = answer["differences"]
        return {"answer": answer, "moving": moving(made)}


def tight_replanned(ranks: int, first: int, last: int) -> dict[str, Any]:
    """The plan changes on the way; all jobs recompute in B, so that no order needs more slots."""

    def shape(rows: Any, *given: Any, honest: Any = process_cases.shape_of) -> Any:
        rows[:] = [row._replace(recompute=True) for row in rows]
        return honest(rows, *given, blocks=False)

    with patched(process_cases, "shape_of", shape):
        return tight(ranks, "replanned", first, last)


def too_small(ranks: int) -> dict[str, Any]:
    """One rank has not even room for one state: what every rank says, and what was written."""
    rows = [Row(j, optimizer="adamw", recompute=True) for j in range(3)]
    schedule = random_schedule([1] * 3, 4, place=[0, 1, 0, 1] if ranks == 2 else [2, 0, 3, 1])
    bytes_of: dict[int, int] = {}

    def weighed(runs: Any, segments: Any, _: int, share: Any) -> Any:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, sum(needs(runs, segments[0], share.device, share)))
        bytes_of.update(enumerate(found))
        raise InputError("weighed")

    array = trainer(rows)
    array.config = RunConfig(memory=1)
    try:
        with patched(training_run, "memory_of", weighed):
            run(array, schedule, 3, **PROCESSES)
    except InputError:
        pass
    order = sorted(bytes_of, key=lambda rank: bytes_of[rank])
    array.config = RunConfig(memory=bytes_of[order[-1]] - 1)  # enough for all others
    folder = Path(process_cases.sys.argv[1]) / f"too-small-{ranks}"
    sentence = "nothing was refused"
    try:
        run(array, schedule, 3, checkpoint=folder, **PROCESSES)
    except InputError as error:
        sentence = str(error)
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, (sentence, folder.exists()))
    found = {
        "said": sentence, "device": f"memory: device{order[-1]} " in sentence,
        "alike": set(said) == {(sentence, False)},
        "others": bytes_of[order[-2]] < bytes_of[order[-1]] - 1,
    }  # fmt: skip
    array.config = RunConfig(memory=10**6 + dist.get_rank())
    try:
        run(array, schedule, 3, **PROCESSES)
    except InputError as error:
        found["unlike"] = str(error)
    return found


def too_large(ranks: int) -> dict[str, Any]:
    """A waiting job needs more for its moments than any slot has: it fails, the others go on."""
    rows = [Row(0, recompute=True), Row(1, recompute=True), Row(2, optimizer="adamw"), Row(0, 11)]
    rows[2:] = [row._replace(recompute=True) for row in rows[2:]]
    array: ArrayTrainer = trainer(rows)
    schedule = random_schedule([1, 1], 4, place=[1, 0, 1, 0], seed=1)
    with tightly() as made:
        result = run(array, schedule, 4, queue=True, **PROCESSES)
    report = result.report
    return {
        "moving": moving(made),
        "status": [job.status for job in array.jobs],
        "error": str(array.jobs[2].error),
        "differences": others(result, rows, 2),
        # waits for copies of all ranks are in the report, and in no block's time
        "exposed": report.exposed_ns > 0,
        "whole": all(d.compute_ns <= report.wall_ns for d in report.devices),
    }


def others(result: Any, rows: list[Row], failed: int) -> list[str]:
    """All in which jobs differ from training alone, apart from one."""
    return [
        line
        for j, trained in enumerate(result.trained)
        if j != failed
        for line in differences(trained, alone(rows[j], 4))
    ]


def refilled(ranks: int) -> dict[str, Any]:
    """Six jobs on two slots by `refill`; one does not recompute, and is refused by rank 0 alone."""
    rows = [Row(j, optimizer="adamw", recompute=j != 3) for j in range(6)]
    rest = [row.job for row in rows[2:]]
    array, made = trainer(rows[:2]), []
    problem = JobArray([[2] * 4] * 2, [[2] * 4] * 2, place=[0, 1, 0, 1], objective="period")

    def limited(runs: Any, segments: Any, _: None, share: Any) -> Any:
        room = sum(needs(runs, segments[0], share.device, share))  # for one slot of each kind
        limit = 10**9 if share.device else room
        made.append(memory_of(runs, segments, limit, share))
        return made[-1]

    with patched(training_run, "memory_of", limited):
        result = run(array, 
            in_turn(problem, True), 4,
            refill=lambda job: rest.pop(0) if rest else None, **PROCESSES,
        )  # fmt: skip
    return {
        "slots": moving(made),
        "status": [job.status for job in array.jobs],
        "error": str(array.jobs[3].error),
        "differences": others(result, rows, 3),
    }


vars(process_cases).update({
    case.__name__: case for case in (
        tight, tight_replanned, too_small, too_large, refilled
    )
})  # fmt: skip

if __name__ == "__main__":
    main()
