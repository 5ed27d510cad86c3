"""One rank of a sweep: ``sweep_rank.py FOLDER`` under torchrun; rank 0 prints what differs."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import optuna
import torch
from test_arraypipe_sweep import Doomed, Hook, alone_of, failing, states, study_of, suggest

from optsched.arraypipe import ArraySweep, ArrayTrainer, Job, RunConfig, SweepResult, read_weights
from optsched.arraypipe.train_alone import differences

STEPS = 6


def main() -> None:
    """Pruned, failed and refilled trials; a grid; then an interrupted sweep and its resume."""
    from arraypipe_models import build_model, data, loss

    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    torch.set_num_threads(1)
    trainer, names = ArrayTrainer(build_model, data, [4], loss), ("4",)
    answer: dict[str, Any] = {"differences": []}

    def check(result: SweepResult, make: Any = suggest) -> None:
        for row in result.trials:
            if row.trial.state.name != "FAIL" and row.trained is not None:
                found = differences(row.trained, alone_of(row, make, names))
                answer["differences"] += found

    def config(**more: Any) -> RunConfig:
        return RunConfig(check=0, verbose=False, timeout=60.0, **more)

    fails = failing((1, 5), "forward", failing((3,), "loss"))
    study = None if rank else study_of(Doomed(2, [0, 4]))
    result = ArraySweep(trainer, study, fails, 3, STEPS).run(9, config=config(every=2))
    if study is not None:
        answer["states"] = "".join(state[0] for state in states(study))
        answer["lengths"] = [len(row.losses) for row in result.trials]
        check(result, fails)
    study = None if rank else study_of()
    if study is not None:
        study.sampler = optuna.samplers.GridSampler({"lr": [1e-3, 1e-2], "size": [6, 8]})
    result = ArraySweep(trainer, study, suggest, 3, 2).run(4, config=config())
    answer["grid"] = [len(row.losses) for row in result.trials]
    check(result)

    def press(job: Job, iteration: int, value: float) -> None:
        if (job.name, iteration) == ("trial2", 9):
            os.kill(os.getpid(), signal.SIGINT)

    study = None if rank else study_of()
    sweep = ArraySweep(trainer, study, suggest, 2, 40)
    given: dict[str, Any] = {"checkpoint": Path(folder) / "ckpt", "config": config(every=4)}
    sweep.run(5, callbacks=[Hook(press)], **given)
    answer["interrupted"] = states(study) if study is not None else []
    second = sweep.run(5, resume=True, **given)
    if study is not None:
        answer["resumed"] = states(study)
        for row in second.trials:
            model = read_weights(Path(folder) / "ckpt" / row.job.name / "40")
            alone = alone_of(row, suggest, names, 40)
            answer["differences"] += [
                name for name, value in alone.parameters.items()
                if not torch.equal(model[name], value)
            ]  # fmt: skip
            if row.trial.value != sum(alone.losses[-10:]) / 10:
                answer["differences"].append(f"value of {row.job.name}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
