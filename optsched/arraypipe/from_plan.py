"""Train the job arrays of a plan on this machine, a process per GPU."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.plan.array_request import planned_arrays
from optsched.plan.arrays import schedule_of

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule

PROGRAM: Final = (sys.executable, "-c", "from optsched.cli import main; main()")
"""Command line of ``optsched`` in a process of this interpreter."""
LAUNCH: Final = "from optsched.arraypipe.from_plan import launch; launch()"


def _folder(name: str) -> str:
    return re.sub(r"[^\w=-]", "-", name)


def chosen_array(plan: Schedule, name: str | None) -> Schedule:
    """Return the schedule of an array of a plan; any other schedule as it is."""
    names = [one.name for one in planned_arrays(plan)]
    if name is None and not names:
        return plan
    if name is None and len(names) > 1:
        raise InputError(f"array: the plan has {', '.join(names):.200}; choose one by --array")
    return schedule_of(plan, name or names[0])


def check_trainable(plan: Schedule) -> None:
    """Refuse a plan without scripts, with arrays on several hosts, or with folders of one name."""
    arrays = [one for one in planned_arrays(plan) if one.script]
    if not arrays:
        raise InputError("train: no array with a script starts")
    for one in arrays:
        if not Path(one.script.rpartition(":")[0]).is_file():
            raise InputError(f"train: script of {one.name}: no file {one.script!r:.200}")
    if len({_folder(one.name) for one in arrays}) < len(arrays):
        raise InputError("train: names of arrays differ only in characters that no folder has")
    hosts = {plan.resources[gpu].name.rpartition("/")[0] for one in arrays for gpu in one.gpus}
    if len(hosts) > 1:
        raise InputError(
            f"train: the arrays use {len(hosts)} hosts; write the plan with -o, and start "
            "`optsched arraypipe run SCRIPT PLAN --array NAME` on them"
        )


def train(plan: Schedule, file: Path, folder: Path) -> bool:
    """Train every array with a script, all at once; return whether none failed.

    Results, checkpoints and the log of an array are in a folder of its name. A run continues from
    checkpoints that are there. `file` has the plan.
    """
    running, good = [], True
    for one in planned_arrays(plan):
        if not one.script:
            continue
        place = folder / _folder(one.name)
        place.mkdir(parents=True, exist_ok=True)
        (place / "summary.json").unlink(missing_ok=True)
        saved = place / "checkpoints"
        ids = [plan.resources[gpu].name.rpartition("/")[2] for gpu in one.gpus]
        words = ["arraypipe", "run", one.script, file, "--array", one.name, "--steps", one.steps,
                 "-o", place, "--checkpoint", saved, *["--resume"] * saved.exists(),
                 *(["--ranks", len(ids)] if len(ids) > 1 else [])]  # fmt: skip
        env = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(ids)}
        with open(place / "log.txt", "wb") as log:
            process = Popen([*PROGRAM, *map(str, words)], stdout=log, stderr=log, env=env)
            running.append((one.name, place, process))
    for name, place, process in running:
        ended(process)
        if not (place / "summary.json").exists():
            lines = (place / "log.txt").read_text(errors="replace").splitlines()
            why = next((line for line in lines if line.startswith("error:")), "failed")
            print(f"{name}: {why}; see {place / 'log.txt'}", file=sys.stderr)
            good = False
            continue
        for job in json.loads((place / "summary.json").read_text())["jobs"]:
            first, last = job["first_loss"], job["last_loss"]
            losses = "" if first is None else f", loss {first:.4f} -> {last:.4f}"
            print(f"{name}/{job['name']}: {job['status']}{losses}")
            good &= job["status"] != "failed"
    return good


def ended(process: Popen[bytes]) -> int:
    """Wait until a process ends by itself, also after Ctrl-C, which it gets too."""
    while process.poll() is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            print("waiting for whole iterations and checkpoints", file=sys.stderr)
    return process.returncode


def launch() -> None:
    """Run `torchrun`; exit with 2 if a rank does, as for wrong input, which it has printed."""
    import logging
    import signal

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        first, _ = error.get_first_failure()
        for rank, code in codes.items():  # others are ended by a signal when the first has failed
            if code not in (1, 2) and (rank == first or code != -signal.SIGTERM):
                print(f"failed: rank {rank} ended with code {code}", file=sys.stderr)
        sys.exit(2 if 2 in codes.values() else 1)
