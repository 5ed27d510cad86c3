"""``optsched arraypipe``: profile, advise, problem, plan, run, report, demo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import Popen
from typing import Annotated

import typer

from optsched.cli.options import AsJson, Quiet, ScheduleFile, argument, numbers, only, option
from optsched.cli.output import wrote
from optsched.errors import InputError
from optsched.io.files import check_outputs

Script = Annotated[str, argument("FILE.py:FUNCTION, which makes the ArrayTrainer.")]
ProfileFile = Annotated[Path, argument("A *.profile.json document.")]
Out = Annotated[Path | None, option("[default: beside the input, by its name]", "-o", "--output")]
Folder = Annotated[Path | None, option("Folder for plan, trace and summary.", "-o", "--output")]
Memory = Annotated[str | None, option("Of a device: 40GB; for problem also device: as profiled.")]


def profile(
    script: Script,
    output: Out = None,
    sizes: Annotated[
        str | None, option("Micro-batch sizes 1,2,4,8 [default: of the jobs].")
    ] = None,
) -> None:
    """Measure times and memory of the blocks of a script's jobs.

    Example: optsched arraypipe profile train.py:make -o train.profile.json
    """
    from optsched.arraypipe.commands import guarded, load_trainer

    chosen = None if sizes is None else numbers("sizes", sizes)
    path, trainer = load_trainer(script)
    target = output or path.with_name(f"{path.stem}.profile.json")
    check_outputs([target], [path])
    found = guarded(path, lambda: trainer.profile(chosen))
    print(found)
    wrote(target, found.write)


def advise(
    file: ProfileFile,
    devices: Annotated[int | None, option("How many [default: as profiled].")] = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Compare one job per GPU, 1F1B and the job array, in seconds per round of all jobs.

    Example: optsched arraypipe advise train.profile.json --devices 4
    """
    from optsched.arraypipe.advice import advise as advice_on

    advice = advice_on(file, devices=devices, memory=memory)
    print(json.dumps(advice.as_dict()) if as_json else advice)


def problem(
    file: ProfileFile,
    output: Out = None,
    objective: Annotated[str, option("period, or makespan of an iteration.")] = "period",
    memory: Memory = None,
) -> None:
    """Write the instance of profiled jobs, for `optsched solve`; needs no PyTorch.

    Example: optsched arraypipe problem train.profile.json --memory 40GB
    """
    from optsched.arraypipe.profile import Profile

    name = file.name.removesuffix(".json").removesuffix(".profile")
    target = output or file.parent / f"{name}.jobarray.json"
    check_outputs([target], [file])
    array = Profile.read(file).problem(objective=objective, memory=memory)
    size = f"{array.n_jobs} jobs, {array.n_stages} stages on {array.n_devices} devices"
    wrote(target, array.write, f": {size}")


def plan(file: ScheduleFile, as_json: AsJson = False) -> None:
    """Check that a schedule can be run without deadlock; starts nothing, needs no PyTorch.

    Example: optsched arraypipe plan plan.schedule.json
    """
    from optsched.arraypipe.plan.plan import compile_plan
    from optsched.arraypipe.report import explain, predict
    from optsched.io.strict_json import placed
    from optsched.model.schedule import Schedule

    schedule = Schedule.read(file)
    with placed(f"{file}: "):
        found = compile_plan(schedule)
        text = f"{file}: can be run: {explain(found)}"
    print(json.dumps({"file": str(file), **predict(found)._asdict()}) if as_json else text)


def run(
    script: Script,
    schedule: Annotated[
        Path | None, argument("A *.schedule.json document [default: measure and solve first].")
    ] = None,
    array: Annotated[str | None, option("Name of the job array, if the plan has several.")] = None,
    steps: Annotated[int, option("Iterations of every job, counted from its seed.")] = 100,
    checkpoint: Annotated[Path | None, option("Folder for checkpoints.")] = None,
    every: Annotated[
        int | None, option("Iterations between checkpoints [default: the script's, else the last].")
    ] = None,
    resume: Annotated[bool, option("From the latest checkpoints.", "--resume")] = False,
    ranks: Annotated[int | None, option("Processes, one per device (torchrun).", min=1)] = None,
    output: Folder = None,
    quiet: Quiet = False,
) -> None:
    """Train a script's jobs by a schedule; Ctrl-C ends every job's iteration and saves.

    Example: optsched arraypipe run train.py:make plan.schedule.json --checkpoint ckpt
    """
    from optsched.arraypipe.commands import need_torch, run_script
    from optsched.arraypipe.from_plan import LAUNCH, PROGRAM, chosen_array, ended
    from optsched.arraypipe.plan.plan import compile_plan
    from optsched.model.schedule import Schedule

    only({"array": array}, schedule is not None, "with SCHEDULE")
    only({"every": every}, checkpoint is not None, "with --checkpoint")
    given = None if schedule is None else chosen_array(Schedule.read(schedule), array)
    if ranks is not None and "RANK" not in os.environ:
        need_torch()
        devices = ranks if given is None else len(compile_plan(given).devices)
        if ranks != devices:
            raise InputError(f"ranks: expected {devices}, one per device, got {ranks}")
        launcher = ["--standalone", f"--nproc-per-node={ranks}", "--no-python"]
        program = [sys.executable, "-c", LAUNCH, *launcher, *PROGRAM, *sys.argv[1:]]
        raise typer.Exit(ended(Popen(program, env={"OMP_NUM_THREADS": "1", **os.environ})))
    settings = {"verbose": not quiet} | ({} if every is None else {"every": every})
    if not run_script(script, given, steps, output, settings, checkpoint=checkpoint, resume=resume):
        raise typer.Exit(1)


def report(
    folder: Annotated[Path, argument("What `run -o` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Print jobs, losses, devices, and predicted and measured times of a run.

    Example: optsched arraypipe report out
    """
    from optsched.arraypipe.commands import read_summary

    print(read_summary(folder, as_json))


def demo(
    output: Folder = None,
    steps: Annotated[int, option("Training steps per job.", min=1)] = 20,
    schedule: Annotated[Path | None, option("Train by this [default: measure and solve].")] = None,
) -> None:
    """Train four sibling jobs; check that weights equal those of training each alone.

    Example: optsched arraypipe demo --steps 20
    """
    from optsched.arraypipe.commands import check_folder, need_torch, summary_of, write_results
    from optsched.model.schedule import Schedule

    given = None if schedule is None else Schedule.read(schedule)
    check_folder(output)
    need_torch()
    from optsched.arraypipe.demo import run_demo

    result = run_demo(steps, given)
    seconds = result.report.wall_ns / 1e9
    summary = summary_of(result, backend="inline", steps=steps, seconds=seconds)
    print(f"{summary.text}\n\nevery job is bit-identical to training it alone")
    if output is not None:
        write_results(output, summary, result)
