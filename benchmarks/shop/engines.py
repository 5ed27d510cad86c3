"""Who is measured: a name on the command line, and the process that runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PEERS = Path(__file__).resolve().parents[1] / "peers"

REQUIREMENTS = {"pyjobshop": "pyjobshop==0.0.9", "job_shop_lib": "job-shop-lib==1.7.2"}
"""Peers with an environment of their own: their pins conflict with ours."""

STRONG = {
    "use_strong_propagation_in_disjunctive": True,
    "use_dynamic_precedence_in_disjunctive": True,
}
RAW_CPSAT: dict[str, tuple[int | None, dict[str, Any]]] = {
    "cpsat-raw-2": (None, {"num_workers": 2}),
    "cpsat-raw-8": (None, {"num_workers": 8}),
    "cpsat-raw-8-strong": (None, {"num_workers": 8, **STRONG}),
    "cpsat-raw-1-strong": (1, {"num_workers": 1, **STRONG}),
}
"""CP-SAT's bar is the best of these four: cores if not all workers, parameters."""

ONE_CORE = ("dispatch", "tabu", "branch_and_bound", "genetic")
"""Engines of ours with one thread of work: they are given, and measured by, one core."""


class Engine(NamedTuple):
    """A measured solver: label, the process, the name inside it, its cores and options."""

    label: str
    python: str
    script: str
    solver: str
    workers: int
    options: dict[str, Any]


def engines(text: str, workers: int, environments: Path | None) -> list[Engine]:
    """Engines of a comma-separated list.

    ``NAME[@WORKERS][:KEY=VALUE[:KEY=VALUE ...]]``: a registered solver with options, a peer
    (``pyjobshop``, ``job_shop_lib``), or raw CP-SAT (``cpsat-raw`` for all four settings).
    """
    found: list[Engine] = []
    for part in text.split(","):
        names = list(RAW_CPSAT) if part == "cpsat-raw" else [part]
        found += [_engine(name, workers, environments) for name in names]
    return found


def _engine(text: str, workers: int, environments: Path | None) -> Engine:
    spec = re.fullmatch(r"([\w-]+)(?:@(\d+))?((?::\w+=[^:]+)*)", text)
    if spec is None:
        raise SystemExit(f"--solvers: expected NAME[@WORKERS][:KEY=VALUE], got {text!r}")
    name, cores, tail = spec.groups()
    options = dict(_option(pair) for pair in tail.split(":") if pair)
    given = int(cores) if cores else None
    if name in RAW_CPSAT:
        fewer, parameters = RAW_CPSAT[name]
        return Engine(text, sys.executable, "run_cpsat.py", name, given or fewer or workers,
                      parameters | options)  # fmt: skip
    if name in REQUIREMENTS:
        python = _python(environments, name)
        return Engine(text, python, f"run_{name}.py", name, given or workers, options)
    own = given or (1 if name in ONE_CORE else workers)
    return Engine(text, sys.executable, "run_optsched.py", name, own, options)


def install(folder: Path) -> None:
    """Create an environment for every peer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, requirement in REQUIREMENTS.items():
        print(f"{folder / name}: {requirement}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        python = _python(folder, name)
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)


def _python(folder: Path | None, name: str) -> str:
    if folder is None:
        raise SystemExit(f"{name}: --peers DIR is required (made by: peers install --into DIR)")
    for place in ("bin/python", "Scripts/python.exe"):
        if (folder / name / place).exists():
            return str(folder / name / place)
    if (folder / name / "pyvenv.cfg").exists():
        raise SystemExit(f"{folder / name}: has no python")
    raise SystemExit(f"{folder / name}: no environment; run: peers install --into {folder}")


def _option(pair: str) -> tuple[str, Any]:
    key, value = pair.split("=", 1)
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if re.fullmatch(r"-?\d+", value) else value
