"""Times of the core: import, document, verifier, evaluator, rules, bounds (medians, warm).

python benchmarks/core.py [--repeat 21]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from machine import machine

import optsched
from optsched.formats import taillard
from optsched.model import document
from optsched.model.graph import evaluate
from optsched.pipelines.generator import job_array

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Print one line per measurement."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeat", type=int, default=21)
    repeat = options.parse_args().repeat
    from optsched.kernels import longest_path
    from optsched_solvers.shop import dispatch

    print(machine("numpy", "numba", "msgspec"))
    for code in ("pass", "import optsched", "import optsched.kernels.list_schedule"):
        show(f"python -c '{code}'", lambda c=code: subprocess.run([sys.executable, "-c", c]), 5)
    ta71 = taillard.instance("ta71").graph()
    schedule = dispatch.run(ta71, "mwkr")
    assert schedule is not None
    show("evaluate 2,000 operations, compiled",
         lambda: longest_path.evaluate(ta71, schedule.sequences), repeat)  # fmt: skip
    show("evaluate 2,000 operations, plain Python",
         lambda: evaluate(ta71, schedule.sequences), repeat)  # fmt: skip
    show("verify 2,000 operations", lambda: optsched.verify(schedule), repeat)
    show("one rule, 2,000 operations", lambda: dispatch.run(ta71, "mwkr"), repeat)
    array = job_array("gpt2_xl", 8, 30, memory="80GB", recompute=True)
    show("one rule, 30 jobs x 8 devices with memory",
         lambda: dispatch.run(array.graph(), "valley"), repeat)  # fmt: skip
    show("bounds, 30 jobs x 8 devices", array.lower_bound, repeat)
    large = job_array("bert_large", 8, 8000)
    plan = dispatch.run(large.graph(), "valley")
    assert plan is not None
    text = document.write(plan).decode()
    show(f"write {plan.n_operations:,} operations", lambda: document.write(plan), 5)
    show(f"read {plan.n_operations:,} operations", lambda: document.read(text), 5)
    show(f"verify {plan.n_operations:,} operations", lambda: optsched.verify(plan), 5)


def show(name: str, call: Callable[[], object], repeat: int) -> None:
    """Median time of a call, one run to warm up."""
    call()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    print(f"{name:46} {statistics.median(times) * 1e3:10.3f} ms", flush=True)


if __name__ == "__main__":
    main()
