"""Job arrays of ``optsched plan``: instances from files, and training by the plan."""

from __future__ import annotations

import json
import os
import sys
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.problems.jobarray import document
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.model.schedule import Schedule

_RUN = [sys.executable, "-c", "from optsched.cli import main; main()", "arraypipe", "run"]


def with_instances(tree: Any, folder: Path) -> Any:
    """Replace names of files in the job arrays of a snapshot by their instances.

    A profile (``*.profile.json``) becomes the instance of its jobs; scripts get the folder.
    """
    from optsched.arraypipe.profile import Profile
    from optsched.formats.read_problem import read_problem

    jobs = tree.get("jobs") if isinstance(tree, dict) else None
    for job in jobs if isinstance(jobs, list) else ():
        array = job.get("array") if isinstance(job, dict) else None
        if isinstance(array, dict) and isinstance(script := array.get("script"), str):
            array["script"] = str(folder / script)
        if isinstance(array, dict) and isinstance(name := array.get("problem"), str):
            path = folder / name
            profiled = name.endswith(".profile.json")
            found: Any = Profile.read(path).problem() if profiled else read_problem(path)
            if not isinstance(found, JobArray):
                raise InputError(f"{path}: expected a job array, got a {type(found).__name__}")
            array["problem"] = json.loads(document.write(found))
    return tree


def check_trainable(found: Schedule) -> None:
    """Refuse to train arrays on several hosts from here, or a plan without scripts."""
    from optsched.plan.arrays import planned_arrays

    arrays = [one for one in planned_arrays(found) if one.script]
    if not arrays:
        raise InputError("train: no array with a script starts")
    hosts = {found.resources[gpu].name.rpartition("/")[0] for one in arrays for gpu in one.gpus}
    if len(hosts) > 1:
        raise InputError(
            f"train: the arrays use {len(hosts)} hosts; write the plan with -o, and start "
            "`optsched arraypipe run SCRIPT PLAN --array NAME` on them"
        )


def train(found: Schedule, plan: Path, folder: Path) -> list[str]:
    """Train every array with a script, all at once, a process per GPU; return those that failed.

    Results, checkpoints and the log of an array are in a folder of its name. A run continues from
    checkpoints that are there.
    """
    from optsched.plan.arrays import planned_arrays

    arrays, running = [one for one in planned_arrays(found) if one.script], []
    for one in arrays:
        place = folder / one.name.replace("/", "-")
        place.mkdir(parents=True, exist_ok=True)
        saved = place / "checkpoints"
        ids = [found.resources[gpu].name.rpartition("/")[2] for gpu in one.gpus]
        words = [one.script, plan, "--array", one.name, "--steps", one.steps, "--out", place,
                 "--checkpoint", saved, *["--resume"] * saved.exists(),
                 *(["--ranks", len(ids)] if len(ids) > 1 else [])]  # fmt: skip
        visible = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(ids)}
        with open(place / "log.txt", "wb") as log:
            running.append((one, place, Popen(
                [*_RUN, *map(str, words)], stdout=log, stderr=log, env=visible
            )))  # fmt: skip
    failed = []
    for one, place, process in running:
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                print("waiting for whole iterations and checkpoints", file=sys.stderr)
        if process.returncode:
            lines = (place / "log.txt").read_text(errors="replace").splitlines()
            why = next((line for line in lines if line.startswith(("error:", "failed:"))), "")
            print(f"{one.name}: {why or 'failed'}; see {place / 'log.txt'}", file=sys.stderr)
            failed.append(one.name)
            continue
        for job in json.loads((place / "summary.json").read_text())["jobs"]:
            losses = f"loss {job['first_loss']:.4f} -> {job['last_loss']:.4f}"
            print(f"{one.name}/{job['name']}: {job['status']}, {losses}")
    return failed
