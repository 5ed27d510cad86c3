"""One rank of a sweep: ``python sweep_rank.py RANK RANKS FOLDER``; rank 0 prints what differs."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import optuna
import torch
import torch.distributed as dist
from arraypipe_models import build_model, data, loss
from test_arraypipe_sweep import Doomed, failing, states, study_of, suggest

from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.sweep.sweep import ArraySweep, SweepResult
from optsched.arraypipe.train_alone import Trained, differences, train_alone

CUTS = {2: [4], 4: [3, 4, 6]}
STEPS = 6


def main() -> None:
    """Pruned, failed and refilled trials; then an interrupted sweep and the rest of it."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    make_trainer = ArrayTrainer(build_model, data, stages=CUTS[ranks], loss=loss).with_jobs
    names = tuple(map(str, CUTS[ranks]))

    def alone_of(row: Any, make: Any = suggest) -> Trained:
        job = make(optuna.trial.FixedTrial(row.trial.params, row.trial.number))
        return train_alone(build_model, job, names, loss, data, len(row.losses))

    def check(result: SweepResult, make: Any = suggest) -> None:
        for row in result.trials:
            if row.trial.state != optuna.trial.TrialState.FAIL and row.trained is not None:
                assert differences(row.trained, alone_of(row, make)) == []

    fails = failing((1, 5), "forward", failing((3,), "loss"))
    study = study_of(Doomed(2, [0, 4])) if rank == 0 else None
    sweep = ArraySweep(make_trainer, study, fails, 3, STEPS, [2, 4])
    result = sweep.run(9, backend="process")
    answer: dict[str, Any] = {}
    if study is not None:
        answer["states"] = "".join(state[0] for state in states(study))
        answer["lengths"] = [len(row.losses) for row in result.trials]
        check(result, fails)

    grid = optuna.samplers.GridSampler({"lr": [1e-3, 1e-2], "size": [6, 8]})
    study = study_of() if rank == 0 else None
    if study is not None:
        study.sampler = grid
    result = ArraySweep(make_trainer, study, suggest, 3, 2).run(backend="process")
    answer["grid"] = [len(row.losses) for row in result.trials]
    check(result)

    def broken_trainer(jobs: Any) -> ArrayTrainer:
        if rank == ranks - 1:
            raise OSError("no such data here")
        return make_trainer(jobs)

    def broken_jobs(trial: Any) -> Job:
        if not rank:
            raise OSError("no such range here")
        return suggest(trial)

    answer["refused"] = []
    for makers in ((broken_trainer, suggest), (make_trainer, broken_jobs)):
        said = "nothing"
        try:
            ArraySweep(makers[0], study_of(), makers[1], 2, 2).run(2, backend="process")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        everybody = [said] * ranks
        dist.all_gather_object(everybody, said)
        answer["refused"].append(everybody)

    def press(job: Job, iteration: int, value: float) -> None:
        if (job.name, iteration) == ("trial2", 9):
            os.kill(os.getpid(), signal.SIGINT)

    study = study_of() if rank == 0 else study_of(study_name="other")
    order = random_schedule([1, 1], ranks, seed=3)
    sweep = ArraySweep(make_trainer, study, suggest, 2, 40, schedule=order)
    given: dict[str, Any] = {"checkpoint": folder / "ckpt", "checkpoint_every": 4}
    first = sweep.run(5, backend="process", on_step=press, **given)
    if rank == 0:
        answer["interrupted"] = states(study)
        check(first)
    second = sweep.run(5, backend="process", resume=True, **given)
    if rank == 0:
        answer["resumed"] = states(study)
        answer["whole"] = [len(row.losses) for row in second.trials]
        for row in second.trials:
            alone = alone_of(row)
            model = read_weights(folder / "ckpt" / row.job.name / "40")
            whole = {**alone.parameters, **alone.buffers}
            assert all(torch.equal(model[name], whole[name]) for name in model)
            assert row.losses == alone.losses
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
