"""The program as a process of its own: Ctrl-C, pipes, encodings, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from program import PATIENCE, PROGRAM, Cli, start

import optsched
from optsched.model.schedule import Schedule


def test_interrupt_writes_the_best_so_far(cli: Cli) -> None:
    """Ctrl-C in a long search: exit code 0, a verified schedule, and the process is gone."""
    assert cli("convert", "ta41", "hard.txt", "--lossy").code == 0
    process = start("solve", "hard.txt", "--time", "600", "-o", "out.json")
    assert process.stderr is not None
    line = next(line for line in process.stderr if "objective -" not in line)
    assert "objective" in line, line  # something is found
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "interrupted: best so far" in out
    schedule = Schedule.read("out.json")
    assert optsched.verify(schedule) == []
    assert schedule.provenance["interrupted"] is True


def test_nothing_but_a_guard_is_loaded_before_the_guard() -> None:
    """What `from optsched.cli import main` loads, no Ctrl-C can interrupt for long."""
    code = "import sys; old = set(sys.modules); from optsched.cli import main\n"
    code += "print(*sorted(set(sys.modules) - old))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    few = {"__future__", "importlib", "types", "warnings", "_contextvars", "_py_warnings"}
    own = {name for name in ran.stdout.split() if name.partition(".")[0] not in few}
    assert own == {"optsched", "optsched.cli", "optsched.version"}


@pytest.mark.parametrize("module", ["optsched.errors", "optsched.model.document"])
def test_interrupt_while_loading(cli: Cli, module: str) -> None:
    """Ctrl-C in the middle of any import: one word, exit code 130, and no traceback."""
    program = f"""
import signal, sys
class Press:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
from optsched.cli import main
sys.argv = ["optsched", "verify", "plan.json"]
main()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("moment", ["bound"])
def test_interrupt_after_a_library_took_the_handler_away(moment: str) -> None:
    """CP-SAT called directly leaves the default action, which would end the process.

    Whatever the moment: the first one comes before any engine has been asked.
    """
    program = f"""
import signal, optsched
from ortools.sat.python import cp_model
model = cp_model.CpModel()
model.maximize(model.new_int_var(0, 5, "x"))
cp_model.CpSolver().solve(model)
shop = optsched.JobShop.read("ta41")
def interrupt(progress):
    if progress.event == "{moment}":
        signal.raise_signal(signal.SIGINT)
print(optsched.solve(shop, "dispatch", iterations=10**9, on_progress=interrupt).interrupted)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


@pytest.mark.slow
def test_reader_goes_away(cli: Cli) -> None:
    """`optsched show FILE | head -0`: no traceback, no complaint of the interpreter."""
    for command in ("show", "verify"):
        process = start(command, "plan.json")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(timeout=PATIENCE) in (0, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_output_on_a_full_disk(cli: Cli) -> None:
    """Said in one line, and not success."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*PROGRAM, "verify", "plan.json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ran.returncode != 0
    assert ran.stderr.count("\n") == 1 and "No space left" in ran.stderr


def test_narrow_encoding(cli: Cli) -> None:
    """A terminal that knows only ASCII gets escapes instead of an error."""
    shop = optsched.JobShop([[(0, 1)]], name="größe \U0001f600")
    shop.write("named.json")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = start("solve", "named.json", env=environment)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Error" not in err, err  # a slow search tells its progress
    assert "gr\\xf6\\xdfe" in out


def test_output_to_a_pipe(cli: Cli) -> None:
    """`-o /dev/stdout` writes the document there."""
    process = start("solve", "shop.txt", "--quiet", "-o", "/dev/stdout")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["format"] == "optsched.schedule/1"
