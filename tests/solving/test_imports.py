"""What an import costs: nothing heavy is loaded before somebody needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "ortools", "torch", "matplotlib", "numba", "networkx", "llvmlite", "pandas", "joblib", "deap",
)  # fmt: skip


def loaded(code: str) -> tuple[str, set[str]]:
    """Output of a program in a fresh interpreter, and the heavy packages it has loaded."""
    end = f"""
import sys
print()
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code + end], capture_output=True, text=True, check=True
    )
    *out, last = ran.stdout.split("\n")[:-1]
    return "\n".join(out), set(last.split())


def command(*words: str) -> str:
    """Code that runs the program and goes on."""
    return f"""
import sys
from optsched.cli import main
sys.argv = {["optsched", *words]!r}
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
"""


PLAN = """
import optsched
from optsched.model.document import read, write
s = optsched.Schedule(resources=(optsched.Resource("a"),), duration=[1], op_resources=[[0]],
    sequences=[[0]], start=[0])
assert not optsched.verify(read(write(s).decode()))
assert optsched.JobShop([[(0, 1)]]).lower_bound() == 1
assert optsched.JobArray([[1]], [[2]]).lower_bound() == 3
"""


@pytest.mark.parametrize(
    "code",
    [
        "import optsched",
        "import optsched.arraypipe",
        "import optsched.plots.gantt_chart, optsched.plots.html, optsched.formats.perfetto",
        "import optsched.analysis.report, optsched.cli.show",
        "from optsched.elastic import MicroController",
        "from optsched.bandwidth import Cluster, BottleneckBandwidth, Policy",
        "import optsched.testing",
        PLAN,
        command("--help"),
        command("--version"),
    ],
)
def test_nothing_heavy(code: str) -> None:
    """None of the packages that take long to load, or that are optional."""
    assert loaded(code)[1] == set()


def test_proof_by_a_rule_needs_no_exact_solver() -> None:
    """An array that a rule solves to optimality never loads OR-Tools."""
    code = """
import optsched
found = optsched.solve(optsched.JobArray([[5, 5]] * 20, [[9, 9]] * 20))
print(found.status)
"""
    out, heavy = loaded(code)
    assert out.strip() == "optimal"
    assert "ortools" not in heavy
