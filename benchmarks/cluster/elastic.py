"""Real elastic training: policies beside their simulation, the paper's ablation, what it all costs.

python -m benchmarks.cluster.elastic workload [--repeats 1]
python -m benchmarks.cluster.elastic ablation [--seeds 5]
python -m benchmarks.cluster.elastic rate [--seeds 5]
python -m benchmarks.cluster.elastic cost

Prints markdown; intervals are 95 % (Student, over seeds). All jobs are small models on the digits
that scikit-learn ships, two worker processes of one thread stand for two GPUs. Times are those of
this machine: on a busy one they say little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.cluster.cluster import Mean, table
from benchmarks.machine import machine
from optsched.cluster import simulate
from optsched.cluster.policies import get
from optsched.elastic import Call, EntropyMeter, MicroController, TrainingJob, run
from optsched.elastic import workloads as digits_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.cluster import Run
    from optsched.elastic import LiveRun

SLOTS = 2
MOST = 40
"""Passes at most."""
SIGMA = 0.5
"""Of the lognormal errors of the passes that policies believe."""


class Kind(NamedTuple):
    """Jobs of one template."""

    model: Call
    classes: int
    repeat: int
    noise: float
    rate: float
    """Of Adam."""


KINDS = {
    "logistic": Kind(Call("logistic"), 10, 64, 0.5, 1e-4),
    "logistic5": Kind(Call("logistic", {"classes": 5}), 5, 128, 0.5, 5e-5),
    "mlp": Kind(Call("mlp", {"dropout": 0.3}), 10, 48, 0.5, 1e-4),
    "mlp5": Kind(Call("mlp", {"classes": 5, "width": 32}), 5, 96, 0.5, 6e-5),
    "mlp2": Kind(Call("mlp", {"classes": 2}), 2, 256, 0.7, 1e-5),
    "cnn": Kind(Call("cnn", {"norm": True}), 10, 12, 0.5, 2e-4),
    "cnn5": Kind(Call("cnn", {"classes": 5}), 5, 28, 0.5, 1e-4),
    "cnn2": Kind(Call("cnn", {"classes": 2, "width": 8, "norm": True}), 2, 80, 0.7, 4e-5),
}
"""Low learning rates and noisy copies: passes long enough to schedule, targets after many."""

BATCH = 512
JOBS = (
    ("mlp", 0.90, 9), ("cnn5", 0.88, 9), ("logistic", 0.84, 8), ("cnn", 0.87, 9),
    ("logistic5", 0.92, 9), ("mlp2", 0.98, 5), ("cnn2", 0.91, 8), ("mlp5", 0.95, 6),
    ("mlp", 0.87, 7), ("cnn", 0.82, 8), ("logistic", 0.80, 6), ("cnn5", 0.85, 6),
)  # fmt: skip
"""Kind, target accuracy, and about the passes that it took when this was written."""
GAP = 1.5
"""Seconds between arrivals."""

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo, 2 workers": ("fifo", {}),
    "fifo, 1 worker": ("fifo", {"gang": 1}),
    "sjf": ("sjf", {}),
    "elastic, fifo": ("elastic", {}),
    "elastic, sjf": ("elastic", {"order": "sjf"}),
    "entropy": ("entropy", {}),
    "entropy, resolved": ("entropy", {"score": "resolved"}),
    "time_to_target": ("time_to_target", {}),
}


def jobs_of(seed: int) -> list[TrainingJob]:
    """The workload; estimates are off by lognormal factors."""
    factor = np.exp(SIGMA * np.random.default_rng(seed).standard_normal(len(JOBS)))
    return [
        made(f"{i:02d}-{kind}", KINDS[kind], seed=seed + i, template=kind, sizes=(1, 2),
             batch_size=BATCH, submit=GAP * i, target=target, passes=MOST,
             expected_passes=min(MOST, max(1, round(about * factor[i]))))
        for i, (kind, target, about) in enumerate(JOBS)
    ]  # fmt: skip


def made(name: str, kind: Kind, **options: Any) -> TrainingJob:
    """A job of a kind."""
    data = {"classes": kind.classes, "repeat": kind.repeat, "noise": kind.noise}
    return TrainingJob(
        name=name, model=kind.model, data=Call("digits", data),
        optimizer=Call("adam", {"lr": kind.rate}), **options,
    )  # fmt: skip


def workload(given: argparse.Namespace) -> None:
    """Every policy for real, and simulated with the times that were measured."""
    names, jobs = list(POLICIES), jobs_of(0)
    policy = {name: get(POLICIES[name][0], **POLICIES[name][1]) for name in names}
    print(f"\n{len(jobs)} jobs, {SLOTS} slots; load of the machine before {load():.1f}")
    runs: dict[str, list[LiveRun]] = {name: [] for name in names}
    for _ in range(given.repeats):
        for name in names:
            runs[name].append(run(jobs, SLOTS, policy[name]))
    real, beside = [], []
    for name in names:
        for one in runs[name]:
            m, last = one.metrics, [log[-1]["metric"] for log in one.records.values()]
            used = float(m.gpu_time.mean())
            seconds = (m.jct_mean, m.queueing_mean, m.service_mean, m.makespan, used)
            passes = sum(job.passes for job in one.live) / len(jobs)
            real.append([name, *(f"{x / 1e3:.1f}" for x in seconds), f"{np.mean(last):.3f}",
                         f"{passes:.1f}", str(m.restarts)])  # fmt: skip
            beside.append(
                [name, f"{m.jct_mean / 1e3:.1f}", *compared(one, again(one, policy[name]))]
            )
    print("\n### Real runs, seconds")
    table(("policy", "JCT", "queueing", "service", "makespan", "GPU time a job",
           "accuracy", "passes", "restarts"), real)  # fmt: skip
    print("\n### The same, simulated with the times that the run measured")
    table(("policy", "real JCT", *COMPARED), beside)
    print("\n### Forecast: mean JCT of the row's policy, simulated from the column's run, to real")
    table(("simulated", *names), [
        [b, *(f"{again(runs[a][0], policy[b]).jct.mean() / runs[b][0].jct.mean() - 1:+.1%}"
              for a in names)]
        for b in names
    ])  # fmt: skip
    print("\n### Passes: milliseconds by workers")
    every = [one for all_of in runs.values() for one in all_of]
    rows = []
    for kind in sorted({job.template for job in jobs}):
        known = [one.times.known[f"template {kind}"] for one in every]
        by_size = [spread(p for one in known for p in one.get(g, [])) for g in (1, 2)]
        rows.append([kind, *by_size])
    table(("template", "1 worker: median (10 %, 90 %)", "2 workers"), rows)
    starts = spread(t for one in every for t in one.times.starts)
    print(f"\nStart of a job on its workers: {starts} ms; load of the machine {load():.1f}")


def again(run: LiveRun, policy: Any) -> Run:
    """Simulate the jobs of a run with the times that it measured; the first start is work."""
    ended = np.flatnonzero(run.log.finished >= 0)
    work, cost = run.workload.take(ended), run.settings.restart_cost
    first = [int(run.log.gpus[run.log.job == job][0]) for job in ended]
    speed = [int(work.rates_of(i)[work.sizes_of(i) == g][0]) for i, g in enumerate(first)]
    extra = cost * np.array(speed, np.int64)
    work = work.changed(work=work.work + extra, estimate=work.estimate + extra)
    return simulate(work, policy, run.nodes, restart_cost=cost, checkpoint="pass")


COMPARED = ("simulated JCT", "error", "by job: median", "worst", "Kendall tau")


def compared(real: Run, simulated: Run) -> list[str]:
    """Errors of the simulated completion times."""
    from scipy.stats import kendalltau

    a, b = real.jct[real.jct >= 0], simulated.jct
    off = np.abs(b / a - 1)
    order = kendalltau(real.log.finished[real.jct >= 0], simulated.log.finished).statistic
    return [f"{b.mean() / 1e3:.1f}", f"{b.mean() / a.mean() - 1:+.1%}", f"{np.median(off):.1%}",
            f"{off.max():.1%}", f"{order:.2f}"]  # fmt: skip


def load() -> float:
    """Processes that want to run, one minute's mean."""
    return os.getloadavg()[0]


def spread(values: Iterable[float]) -> str:
    """Median, and the tenth and ninetieth percentile."""
    x = list(values)
    low, middle, high = np.percentile(x or [np.nan], (10, 50, 90))
    return f"{middle:.0f} ({low:.0f}, {high:.0f})"


SHORT = (
    ("mlp", Kind(Call("mlp", {"dropout": 0.3}), 10, 2, 0.5, 1e-3), 0.92),
    ("cnn", Kind(Call("cnn", {"norm": True}), 10, 1, 0.0, 1e-3), 0.96),
    ("logistic", Kind(Call("logistic"), 10, 2, 0.5, 3e-3), 0.90),
    ("cnn5", Kind(Call("cnn", {"classes": 5}), 5, 1, 0.0, 1e-3), 0.96),
    ("mlp5", Kind(Call("mlp", {"classes": 5}), 5, 1, 0.0, 1e-3), 0.95),
    ("mlp2", Kind(Call("mlp", {"classes": 2, "dropout": 0.5}), 2, 4, 1.5, 3e-4), 0.98),
)
"""Ordinary learning rates."""


CELLS: dict[str, tuple[bool, dict[str, Any] | None]] = {
    "neither (FIFO, gangs of 2)": (False, None),
    "macro only": (True, None),
    "micro only": (False, {}),
    "both": (True, {}),
    "micro only, samples partitioned": (False, {"exposure": "partition"}),
    "micro only, constant rate (gamma 0)": (False, {"gamma": 0.0}),
}
"""Whether quotas change, and options of the micro level."""


def ablation(given: argparse.Namespace) -> None:
    """Table 7 of the paper for real."""
    seeds = range(given.seeds)
    by_seed = [{label: ablated(*cell, seed) for label, cell in CELLS.items()} for seed in seeds]
    found = {label: [one[label] for one in by_seed] for label in CELLS}
    print(f"\n### Ablation: {len(SHORT)} jobs, {SLOTS} slots, {len(seeds)} seeds")
    keys = ("JCT, s", "makespan, s", "passes", "GPU s a job", "accuracy", "targets reached")
    table(("", *keys), [
        [label, *(format(Mean.of(one[key] for one in rows), ".3f") for key in keys)]
        for label, rows in found.items()
    ])  # fmt: skip
    factors = {}
    for label, (macro, micro) in CELLS.items():
        if micro is not None:
            pairs = [*zip(found[label], found[[*CELLS][macro]], strict=True)]
            factors[label] = [Mean.of(ours[key] / its[key] for ours, its in pairs)
                              for key in ("passes", "GPU s a job")]  # fmt: skip
    print("\n### Micro factor: with over without, ratios by seed")
    table(("", "passes", "GPU time"), [
        [label, *(f"{m:.3f}" for m in means)] for label, means in factors.items()
    ])  # fmt: skip


def ablated(macro: bool, micro: dict[str, Any] | None, seed: int) -> dict[str, float]:
    """One run: the jobs come at once in random order."""
    order = np.random.default_rng(seed).permutation(len(SHORT))
    jobs = [
        made(name, kind, seed=100 * seed + i, template=name, target=target, passes=MOST,
             sizes=(1, 2) if macro else (2,), micro=micro, expected_passes=10)
        for i, (name, kind, target) in enumerate(SHORT[k] for k in order)
    ]  # fmt: skip
    one = run(jobs, SLOTS, get("entropy", score="resolved") if macro else get("fifo"))
    last = np.array([log[-1]["metric"] for log in one.records.values()])
    return {
        "JCT, s": one.metrics.jct_mean / 1e3,
        "makespan, s": one.metrics.makespan / 1e3,
        "passes": float(np.mean([job.passes for job in one.live])),
        "GPU s a job": float(one.metrics.gpu_time.mean()) / 1e3,
        "accuracy": float(last.mean()),
        "targets reached": float((last >= [job.spec.target for job in one.live]).mean()),
    }


RULES: dict[str, dict[str, Any]] = {
    "constant": {"gamma": 0.0},
    "gamma .5 (ours)": {"gamma": 0.5},
    "gamma -.5 (decay)": {"gamma": -0.5},
}
RATES = (1e-4, 1e-3, 5e-3)


def rate(given: argparse.Namespace) -> None:
    """Accuracy after so many passes, and passes to a target, by rule and initial rate."""
    seeds, passes = given.seeds, 12
    kinds = {"mlp": (Call("mlp", {"dropout": 0.3}), 0.92), "cnn": (Call("cnn"), 0.95)}
    jobs = {
        (kind, eta, rule, seed): made(
            f"{kind} {eta} {rule} {seed}", Kind(model, 10, 1, 0.0, eta),
            seed=seed, passes=passes, micro=micro,
        )
        for kind, (model, _) in kinds.items()
        for eta in RATES
        for rule, micro in RULES.items()
        for seed in range(seeds)
    }  # fmt: skip
    records = run(jobs.values(), SLOTS, "fifo").records
    print(f"\n### Learning rate rule: {passes} passes, batch 64, Adam, one worker, {seeds} seeds")
    lines = []
    for kind, (_, target) in kinds.items():
        for eta in RATES:
            for rule in RULES:
                logs = [records[jobs[kind, eta, rule, seed].name] for seed in range(seeds)]
                curves = [[r["metric"] for r in log] for log in logs]
                first = [next((k + 1 for k, x in enumerate(c) if x >= target), passes + 1)
                         for c in curves]  # fmt: skip
                lines.append([
                    kind, f"{eta:g}", rule, f"{Mean.of(c[-1] for c in curves):.4f}",
                    f"{target}: {Mean.of(map(float, first)):.1f}",
                    f"{Mean.of(log[-1]['rate'] for log in logs):.2f}",
                ])  # fmt: skip
    table(("model", "initial rate", "rule", "accuracy at the end",
           f"passes to target ({passes + 1}: never)", "last factor"), lines)  # fmt: skip


def cost(_: argparse.Namespace) -> None:
    """The meter beside a training step, and a decision of the micro level."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    steps = 400
    wide = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8192, 100),
    )  # fmt: skip
    lines = []
    for label, model, shape, classes in (
        ("cnn on 8x8 digits, batch 64", digits_models.cnn(), (64, 1, 8, 8), 10),
        ("cnn on 32x32, 100 classes, batch 64", wide, (64, 3, 32, 32), 100),
    ):
        count = steps if shape[2] == 8 else steps // 8
        step, update, both = metered(model, shape, classes, count)
        lines.append([label, f"{step:.3f}", f"{update:.4f}", f"{update / step:.2%}",
                      f"{both / step - 1:+.2%}"])  # fmt: skip
    print("\n### EntropyMeter, milliseconds a step (median, steps with and without alternating)")
    table(("", "step", "update alone", "share", "step with to without"), lines)
    lines = []
    for workers in (10, 100, 1000):
        controller = MicroController(32 * workers, (8, 64), samples=1000 * workers, alpha=0.5)
        random = np.random.default_rng(0)
        took = []
        for _ in range(200):
            h, q = random.random(workers), random.random(workers)
            begin = time.perf_counter()
            controller.step(h, q)
            took.append((time.perf_counter() - begin) * 1e3)
        lines.append([str(workers), f"{statistics.median(took):.3f}",
                      f"{np.percentile(took[1:], 99):.3f}"])  # fmt: skip
    print("\n### MicroController.step, milliseconds (goal: below 1 at 1,000 workers)")
    table(("workers", "median", "99 %"), lines)


def metered(model: Any, shape: tuple[int, ...], classes: int, steps: int) -> tuple[float, ...]:
    """Median milliseconds of a step, of an update alone, and of a step with one."""
    import torch

    optimizer = digits_models.adam(model.parameters())
    x, y = torch.randn(shape), torch.randint(classes, shape[:1])
    meter = EntropyMeter(classes, dim=1)
    took: dict[bool, list[float]] = {False: [], True: []}
    alone = []
    for k in range(2 * steps):
        begin = time.perf_counter()
        out = model(x)
        if k % 2:
            at = time.perf_counter()
            meter.update(out)
            alone.append(time.perf_counter() - at)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        took[bool(k % 2)].append(time.perf_counter() - begin)
    return tuple(1e3 * statistics.median(part[5:]) for part in (took[False], alone, took[True]))


def main() -> None:
    """Print the tables of one part."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "workload": workload, "ablation": ablation, "rate": rate, "cost": cost,
    }  # fmt: skip
    options.add_argument("part", choices=parts)
    options.add_argument("--repeats", type=int, default=1, help="runs of every policy")
    options.add_argument("--seeds", type=int, default=5)
    given = options.parse_args()
    print(machine("torch", "numpy", "scikit-learn"))
    parts[given.part](given)


if __name__ == "__main__":
    main()
