"""Rolling job arrays: gap of the period to its lower bound, and what the barrier would cost.

    python -m benchmarks.shop.rolling gaps [--set plain,caps,...] [--time 10] [--seeds 5]
    python -m benchmarks.shop.rolling barrier [--time 10] [--seeds 5]

Both print a table. Every solve is `optsched.solve`; every schedule is verified. `barrier` searches
one iteration of all jobs for as long as the period, in the same run; in brackets the barrier's
lower bound over the period found, which no search for barrier schedules can undercut.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import TYPE_CHECKING

import optsched
from benchmarks.machine import machine
from optsched import JobArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.solving.result import Result

BATCHES = {
    "vgg19": (128, 256, 512, 768),
    "resnet152": (128, 256, 512, 768),
    "bert_large": (8, 16, 24, 32),
    "gpt2_xl": (8, 16, 24, 32),
}


def profile(model: str, jobs: int, stages: int, seed: int, **options: object) -> JobArray:
    """The paper's mix: batch sizes in equal shares, shuffled."""
    sizes = (BATCHES[model] * jobs)[:jobs]
    shuffled = random.Random(seed).sample(sizes, jobs)
    return JobArray.from_profile(model, stages, shuffled, objective="period", **options)


def mixed(jobs: int, stages: int, seed: int) -> JobArray:
    """Batches 1:2:3:4 at random, b = 3f, equal stages."""
    rng = random.Random(seed)
    forward = [[100 * rng.randint(1, 4)] * stages for _ in range(jobs)]
    backward = [[3 * f for f in row] for row in forward]
    return JobArray(forward, backward, objective="period", name=f"1:2:3:4-{jobs}x{stages}")


def in_flight(array: JobArray) -> JobArray:
    """Room for the largest activation S - s times on stage s, as 1F1B has it."""
    largest, stages = array.activation.max(axis=0), array.n_stages
    memory = [int(largest[v]) * (stages - v) for v in range(stages)]
    return array.replace(memory=memory, name=f"{array.name}-flight")


def split_job(stages: int, micro_batches: int, seed: int) -> JobArray:
    """One job of F, I and W blocks, unequal stages, 2(S - s) - 1 activations on stage s."""
    rng = random.Random(seed)
    forward, backward, weight = ([[rng.randint(50, 200) for _ in range(stages)]] for _ in "FIW")
    return JobArray(
        forward, backward, weight=weight, micro_batches=micro_batches, activation=1,
        memory=[2 * (stages - v) - 1 for v in range(stages)], objective="period",
        name=f"FIW-{micro_batches}x{stages}",
    )  # fmt: skip


SETS: dict[str, list[Callable[[int], JobArray]]] = {
    "equal": [
        lambda seed, size=size: JobArray(  # type: ignore[misc]
            [[100 + seed] * size[1]] * size[0], [[200 + seed] * size[1]] * size[0],
            objective="period", name=f"equal-{size[0]}x{size[1]}",
        )
        for size in ((19, 8), (32, 16), (8, 8))
    ],
    "plain": [
        *(lambda s, m=m, k=k, v=v: profile(m, k, v, s)  # type: ignore[misc]
          for k, v in ((19, 8), (30, 8), (30, 16)) for m in BATCHES),
        *(lambda s, k=k, v=v: mixed(k, v, s)  # type: ignore[misc]
          for k, v in ((19, 8), (30, 8), (30, 16))),
    ],
    "square": [
        *(lambda s, n=n: profile("gpt2_xl", n, n, s) for n in (8, 16)),  # type: ignore[misc]
        *(lambda s, n=n: mixed(n, n, s) for n in (8, 16)),  # type: ignore[misc]
    ],
    "flight": [
        *(lambda s, m=m: in_flight(profile(m, 19, 8, s)) for m in BATCHES),  # type: ignore[misc]
        *(lambda s, m=m: in_flight(profile(m, 30, 8, s)) for m in BATCHES),  # type: ignore[misc]
        lambda s: in_flight(profile("gpt2_xl", 30, 16, s)),
    ],
    "devices": [
        lambda s, size=size: profile(  # type: ignore[misc]
            "gpt2_xl", 19, 8, s, memory=size, recompute_mode="always"
        )
        for size in ("80GB", "40GB")
    ],
    "one": [lambda s, m=m: split_job(8, m, s) for m in (16, 32)],  # type: ignore[misc]
}  # fmt: skip

BARRIER: list[Callable[[int], JobArray]] = [
    SETS["equal"][0], lambda s: mixed(19, 8, s), lambda s: profile("gpt2_xl", 19, 8, s),
    lambda s: profile("bert_large", 30, 8, s), lambda s: profile("resnet152", 30, 8, s),
    lambda s: profile("gpt2_xl", 30, 16, s),
]  # fmt: skip


def main() -> None:
    """Parse the command line and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["gaps", "barrier"])
    parser.add_argument("--set", default=",".join(SETS), help=f"of {', '.join(SETS)} (gaps only)")
    parser.add_argument("--time", type=float, default=10.0, help="seconds a solve")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--begin", type=int, default=0, help="first seed")
    given = parser.parse_args()
    print(machine("numba", "ortools"))
    chosen = list(range(given.begin, given.begin + given.seeds))
    optsched.solve(mixed(3, 2, 0), time_limit=1, workers=given.workers)  # loads what is compiled
    if given.command == "barrier":
        barrier(chosen, given.time, given.workers)
        return
    unknown = set(given.set.split(",")) - SETS.keys()
    if unknown:
        parser.error(f"--set: there is no {min(unknown)!r}; there are {', '.join(SETS)}")
    gaps(given.set.split(","), chosen, given.time, given.workers)


def gaps(names: Iterable[str], chosen: list[int], seconds: float, workers: int) -> None:
    """Per array: gap to the static bound at 1 s and at the end, certified gap, seconds, proofs."""
    print(f"| set | array | gap at 1 s | at {seconds:g} s | worst | certified | seconds | proved |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        for make in SETS[name]:
            arrays = [make(seed) for seed in chosen]
            results = [
                solved(array, seconds, workers, seed)
                for array, seed in zip(arrays, chosen, strict=True)
            ]
            bounds = [array.lower_bound() for array in arrays]
            pairs = list(zip(results, bounds, strict=True))
            early = [known_at(result, 1.0) / bound - 1 for result, bound in pairs]
            late = [value_of(result) / bound - 1 for result, bound in pairs]
            certified = [result.gap or 0.0 for result in results]
            spent = [result.seconds for result in results]
            proved = sum(result.status == "optimal" for result in results)
            print(
                f"| {name} | {arrays[0].name} | {statistics.median(early):.2%} "
                f"| {statistics.median(late):.2%} | {max(late):.2%} "
                f"| {statistics.median(certified):.2%} | {statistics.median(spent):.2f} "
                f"| {proved} of {len(results)} |",
                flush=True,
            )  # fmt: skip


def barrier(chosen: list[int], seconds: float, workers: int) -> None:
    """Per array: best barrier schedule over the period, and the barrier's bound over it."""
    print("| array | barrier / period | least | barrier's bound / period | gap of the period |")
    print("|---|---|---|---|---|")
    for make in BARRIER:
        gains, sure, distance = [], [], []
        for seed in chosen:
            array = make(seed)
            once = solved(array.with_objective("makespan"), seconds, workers, seed)
            period = value_of(rolling := solved(array, seconds, workers, seed))
            gains.append(value_of(once) / period)
            sure.append((once.lower_bound or 0) / period)
            distance.append(rolling.gap or 0.0)
        print(
            f"| {array.name} | {statistics.median(gains):.3f} | {min(gains):.3f} "
            f"| {statistics.median(sure):.3f} | {statistics.median(distance):.2%} |",
            flush=True,
        )


def solved(array: JobArray, seconds: float, workers: int, seed: int) -> Result:
    """The answer of `auto`, verified once more."""
    result = optsched.solve(array, time_limit=seconds, workers=workers, seed=seed)
    if result.schedule is None:
        raise SystemExit(f"{array.name}: {result.status} {result.reason}")
    violations = optsched.verify(result.schedule)
    if violations:
        raise SystemExit(f"{array.name}: {violations[0].message}")
    return result


def value_of(result: Result) -> int:
    """The period or makespan found."""
    assert result.objective is not None
    return result.objective


def known_at(result: Result, seconds: float) -> int:
    """The best value at a moment of the run; the first one if there was none yet."""
    found = [event for event in result.history if event.event == "incumbent"]
    early = [event for event in found if event.elapsed <= seconds] or found[:1]
    value = early[-1].objective
    assert value is not None
    return value


if __name__ == "__main__":
    main()
