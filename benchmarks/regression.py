"""Five timings of this checkout beside those of another commit.

    python -m benchmarks.regression [--base HEAD^] [--rounds 5] [--limit 1.2] [--only NAME ...]

The base is checked out into a folder of its own. Both run the functions of this file by turns, a
process a round, so that the load of the machine meets both; every process loads or compiles its
kernels, warms up, and counts processor time, least of three. The median of the ratios by round is
printed for every timing. The exit code is 1 if one is above the limit in two measurements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT: Final = Path(__file__).parent.parent


def orders() -> Callable[[], object]:
    """A job array of 16 jobs on 8 devices, 60,000 moves of tabu search."""
    import optsched

    array = optsched.JobArray.from_profile("gpt2_xl", stages=8, batch_sizes=[8, 16, 24, 32] * 4)
    return lambda: optsched.solve(array, "tabu", workers=1, iterations=60_000, seed=1)


def gpus() -> Callable[[], object]:
    """20 choices on 4,096 GPUs beside jobs."""
    from optsched.bandwidth import ClusterState, Dispatcher, synthetic
    from optsched.bandwidth.models.bottleneck import BottleneckBandwidth

    cluster = synthetic.cluster("nvswitch", 512, seed=1)
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster), traffic="heavy")
    state = ClusterState.idle(cluster)
    for k in range(40):
        state = state.take(fast.choose(state, 12 + k)[0], f"job{k}")
    return lambda: [fast.choose(state, 24 + k) for k in range(20)]


def quotas() -> Callable[[], object]:
    """Max-min quotas of 10,000 jobs on 100,000 GPUs, 30 times."""
    import numpy as np

    from optsched_solvers import quota

    rng = np.random.default_rng(0)
    scores, most = rng.lognormal(0, 1, 10_000), rng.integers(8, 65, 10_000)
    least = np.ones(10_000, np.int64)
    return lambda: [quota.max_min(scores, 100_000, least, most)[1].holds for _ in range(30)]


def simulator() -> Callable[[], object]:
    """20,000 synthetic jobs of Philly-like sizes on 512 GPUs under shortest remaining time."""
    from optsched.cluster import Nodes, simulate, synthetic

    workload = synthetic(20_000, 0.9, 0, gpus=512)
    return lambda: simulate(workload, "srtf", Nodes(64))


def serving() -> Callable[[], object]:
    """Two seconds of 2,500 requests a second in bursts, routed by `MarginalCost`, 10 times."""
    from optsched import serving as room

    scenario = room.reference(rate=2500, burst=3, seconds=2, seed=0)
    plan = room.plan_instances(room.reference(rate=2500, seed=10_000))
    return lambda: [
        room.simulate(scenario, room.MarginalCost(), plan=plan, log=False) for _ in range(10)
    ]


TIMINGS: Final = {one.__name__: one for one in (orders, gpus, quotas, simulator, serving)}


def main(given: Sequence[str] | None = None) -> int:
    """Compare, or run one timing for a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD^", help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.2, help="most that a ratio may be")
    parser.add_argument("--only", nargs="+", choices=TIMINGS, default=[*TIMINGS])
    parser.add_argument("--seconds", choices=TIMINGS, help="print the seconds of one timing")
    options = parser.parse_args(given)
    if options.seconds:
        print(f"{seconds(TIMINGS[options.seconds]()):.6f}")
        return 0
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "-q", "--detach", str(base), options.base]).returncode:
            parser.error(f"--base: git cannot check out {options.base!r}")
        try:
            return compare(base, options.only, options.rounds, options.limit)
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)


def seconds(call: Callable[[], object], times: int = 3) -> float:
    """Return the least processor time of some calls after one to warm up."""
    call()
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def compare(base: Path, names: Sequence[str], rounds: int, limit: float) -> int:
    """Print a line for every timing; 1 if one is slower than the limit twice."""
    failed = 0
    print(f"{'timing':12}{'here, s':>10}{'base, s':>10}{'ratio':>8}")
    for name in names:
        for _ in range(2):
            pairs = [(run(ROOT, name), run(base, name)) for _ in range(rounds)]
            known = [(here, there) for here, there in pairs if here and there]
            if not known:
                break
            here, there = (statistics.median(column) for column in zip(*known, strict=True))
            ratio = statistics.median(one / other for one, other in known)
            print(f"{name:12}{here:10.4f}{there:10.4f}{ratio:8.2f}", flush=True)
            if ratio <= limit:
                break
        else:
            failed = 1
            print(f"{name}: slower than {limit} times the base")
        if not known:
            broken = "here" if not pairs[0][0] else "at the base"
            print(f"{name:12}does not run {broken}")
            failed |= broken == "here"
    return int(failed)


def run(checkout: Path, name: str) -> float | None:
    """Run a timing with the library of a checkout; None if it fails there."""
    path = os.pathsep.join([str(checkout), str(checkout / "solvers")])
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).resolve()), "--seconds", name],
        env={**os.environ, "PYTHONPATH": path}, cwd=checkout, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-300:], file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())
