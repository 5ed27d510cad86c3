"""A program of two ranks under torchrun: memory, `fit` and a sweep; ``torchrun_script.py FOLDER``.

Every rank writes what it finds to ``FOLDER/<rank>.json``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo  # the first optimizer would load it
from torch import nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Callback, CsvLog, Job, RunConfig, random_schedule
from optsched.arraypipe import fit as fit_module
from optsched.arraypipe.model.lazy import collect

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
WIDTH = 1024


def resident() -> float:
    """Bytes of this process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(rows["VmRSS"].split()[0]) * 1024


class Start(Callback):
    """Looks at the memory before the first block."""

    at = 0.0

    def on_start(self, jobs: Any, steps: int, resumes: bool) -> None:
        """Note it."""
        self.at = resident()


def grown(width: int) -> float:
    """By how much a rank has grown when the first block of four jobs begins."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

    seen, rows = Start(), [(torch.randn(width), torch.zeros(width)) for _ in range(4)]
    jobs = [Job(k, 2, lambda named: torch.optim.AdamW([p for _, p in named])) for k in range(4)]
    collect()
    before = resident()
    made = ArrayTrainer(build, rows, 2, nn.functional.mse_loss)
    made.fit(jobs, 1, callbacks=[seen], config=RunConfig(verbose=False))
    return seen.at - before


def fit() -> str:
    """The sentence for data that differ; a run that is measured and solved, in ``end.pt``."""
    from test_arraypipe_fit import CUTS, DATA, array, build_model, jobs_of, loss

    place = random_schedule([1, 2], 3, seed=1, update=[1], together=[1], place=[0, 0, 1])
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(RANK))
    others, sentence = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), ""
    try:
        other = ArrayTrainer(build_model, others, CUTS, loss)
        other.fit(jobs_of(), 2, schedule=place, config=RunConfig(timeout=60))
    except InputError as error:
        sentence = str(error)
    folder = FOLDER / "fit"
    result = array().fit(
        jobs_of(), 5, checkpoint=folder, evaluate=DATA, callbacks=[CsvLog(folder / "log.csv")],
        config=RunConfig(every=1, timeout=60, verbose=False),
    ).gather()  # fmt: skip
    if not RANK:
        torch.save([[t.parameters, t.buffers] for t in result.trained], folder / "end.pt")
    return sentence


def sweep() -> dict[str, Any]:
    """Pruned, failed and refilled trials; then an interrupted sweep and its resume."""
    from arraypipe_models import build_model, data, loss
    from test_arraypipe_sweep import (
        STEPS,
        ArraySweep,
        Doomed,
        Hook,
        alone_of,
        differences,
        failing,
        states,
        study_of,
        suggest,
    )  # fmt: skip

    from optsched.arraypipe import read_weights

    trainer, names = ArrayTrainer(build_model, data, [4], loss), ("4",)
    answer: dict[str, Any] = {"differences": []}
    how: dict[str, Any] = {"check": 0, "verbose": False, "timeout": 60.0}
    fails = failing((1, 5), "forward", failing((3,), "loss"))
    study = None if RANK else study_of(Doomed(2, [0, 4]))
    config, order = RunConfig(every=2, **how), random_schedule([1] * 3, 2, seed=3)
    result = ArraySweep(trainer, study, fails, 3, STEPS).run(9, schedule=order, config=config)
    if study is not None:
        answer["states"] = "".join(state[0] for state in states(study))
        for row in result.trials:
            if row.trial.state.name != "FAIL" and row.trained is not None:
                answer["differences"] += differences(row.trained, alone_of(row, fails, names))

    def press(job: Job, iteration: int, value: float) -> None:
        if (job.name, iteration) == ("trial2", 9):
            os.kill(os.getpid(), signal.SIGINT)

    study = None if RANK else study_of()
    searching = ArraySweep(trainer, study, suggest, 2, 24)
    given: dict[str, Any] = {
        "checkpoint": FOLDER / "sweep", "config": RunConfig(every=4, **how),
        "schedule": random_schedule([1] * 2, 2, seed=3),
    }  # fmt: skip
    searching.run(5, callbacks=[Hook(press)], **given)
    answer["interrupted"] = states(study) if study is not None else []
    second = searching.run(5, resume=True, **given)
    if study is not None:
        answer["resumed"] = states(study)
        for row in second.trials:
            model = read_weights(FOLDER / "sweep" / row.job.name / "24")
            alone = alone_of(row, suggest, names, 24)
            rows = alone.parameters.items()
            answer["differences"] += [k for k, value in rows if not torch.equal(model[k], value)]
            if row.trial.value != sum(alone.losses[-10:]) / 10:
                answer["differences"].append(f"value of {row.job.name}")
    return answer


def main() -> None:
    """All of it, in one process group."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fit_module._MOST_S = 0.3  # seconds of a solve
    gc.freeze()  # every run collects garbage: what is imported need not be looked at
    grown(16)  # loads modules
    gc.freeze()
    found = {"grown": grown(WIDTH), "stages": 4 * 4 * (WIDTH + 1) * WIDTH * 4}
    found |= {"refused": fit(), "sweep": sweep()}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
