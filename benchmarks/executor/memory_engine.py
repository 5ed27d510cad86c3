"""States in slots on the simulated engine: how much of the copies is hidden.

    python -m benchmarks.executor.memory_engine table
    python -m benchmarks.executor.memory_engine family [--cases 300]

`table`: one stage of eight of GPT-2 XL in bf16 with AdamW in fp32, 16 jobs on one device, PCIe 5;
efficiency = compute / total. `family`: random devices and links; time over max(compute, lower bound
of the copies). Both are arithmetic on a virtual clock.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING

from benchmarks.executor.copy_bound import copy_bound
from benchmarks.machine import machine
from optsched.arraypipe.memory.engines import HostLink
from optsched.arraypipe.memory.residency import (
    ResidencyPlan,
    divide,
    slot_bytes,
)
from optsched.arraypipe.memory.types import State, Visit

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAMETERS = 1_557_611_200 // 8  # of a stage
TOKENS = 8 * 1024  # of an iteration
PCIE_5 = HostLink(55e9, 55e9, 10e3)
Block = tuple[str, int]


def orders(jobs: int) -> dict[str, list[Block]]:
    """Three ways to repeat the blocks of a device."""
    row = range(jobs)
    return {
        "all F, all B": [("F", j) for j in row] + [("B", j) for j in row],
        "B four jobs later": [x for j in row for x in (("F", j), ("B", (j - 4) % jobs))],
        "B, next F": [x for j in row for x in (("B", j), ("F", j))],
    }


def split(order: Sequence[Block], forward: float, backward: float) -> list[Visit]:
    """F and B need weights, the update at the end of B needs everything."""
    visits = []
    for kind, j in order:
        visits.append(Visit(j, kind, duration_ns=forward if kind == "F" else backward))
        if kind == "B":
            visits.append(Visit(j, "U"))
    return visits


def whole(order: Sequence[Block], forward: float, backward: float) -> list[Visit]:
    """The whole state is copied in for F and for B, and out after each."""
    return [Visit(j, "U", duration_ns=forward if kind == "F" else backward) for kind, j in order]


def bound(plan: ResidencyPlan, link: HostLink) -> float:
    """No plan with these slots copies in less time per cycle."""
    return copy_bound(plan.states, plan.visits, [rule.slots for rule in plan.rules], link)


def table() -> None:
    """Efficiency with 1 to 4 slots, at the speed of a current GPU and at a tenth of it."""
    jobs, weights, moments = 16, 2 * PARAMETERS, 12 * PARAMETERS
    both = [State(j, 0, (weights, 0, 0, moments)) for j in range(jobs)]
    one = [State(j, 0, (weights + moments, 0, 0, 0)) for j in range(jobs)]
    print("| TFLOP/s | order | slots | whole state | split pieces | pools of their own | at best |")
    print("|---|---|---|---|---|---|---|")
    for speed in (400, 40):
        work_ns = 1e9 * PARAMETERS * TOKENS / (speed * 1e12)
        for name, order in orders(jobs).items():
            for slots in (1, 2, 3, 4):
                times = 2 * work_ns, 6 * work_ns  # backward with recompute
                room = slots * sum(slot_bytes(both))
                plans = [
                    ResidencyPlan.compile(
                        one, whole(order, *times), None, PCIE_5, slots=(slots, 1), chunk=0
                    ),
                    ResidencyPlan.compile(
                        both, split(order, *times), None, PCIE_5, slots=(slots, slots)
                    ),
                    ResidencyPlan.compile(both, split(order, *times), room, PCIE_5),
                ]
                compute = sum(v.duration_ns for v in plans[2].visits)
                best = compute / max(compute, bound(plans[2], PCIE_5))
                cells = [f"{compute / plan.simulate(PCIE_5).time_ns:.2f}" for plan in plans]
                print(f"| {speed} | {name} | {slots} | {' | '.join(cells)} | {best:.2f} |")


def case(seed: int) -> tuple[list[State], list[Visit], int, float]:
    """A device: states and visits, bytes, and compute over the lower bound of the copies."""
    rng = random.Random(seed)
    jobs = rng.randint(4, 16)
    weights = rng.randint(1, 4) * 10**8
    moments = rng.choice([0, 2, 6]) * weights
    states = [State(j, 0, (weights, 0, 0, moments)) for j in range(jobs)]
    speed = [1.0 if seed % 2 else rng.uniform(0.5, 1.5) for _ in range(jobs)]
    order = rng.choice([*orders(jobs).values(), None])
    if order is None:
        order = [(kind, j) for kind in "FB" for j in range(jobs)]
        rng.shuffle(order)
    visits = []
    for kind, j in order:
        visits.append(Visit(j, kind, duration_ns=speed[j] * (1 if kind == "F" else 3)))
        if kind == "B":
            visits.append(Visit(j, "U"))
    slots = rng.randint(2, max(2, jobs // 2))
    return states, visits, slots * sum(slot_bytes(states)), 10 ** rng.uniform(-0.5, 0.5)


RANGES = ((0, 0.5), (0.5, 0.8), (0.8, 1.0), (1.0, 1.25), (1.25, 2), (2, 99))


def family(cases: int) -> None:
    """Time over the bound, by compute over the bound of the copies."""
    rows = []
    for seed in range(cases):
        states, visits, room, ratio = case(seed)
        unit = HostLink(1e9, 1e9)  # a byte a nanosecond
        least = min(copy_bound(states, visits, d, unit) for d in divide(states, visits, room, ""))
        if not least:
            continue
        compute = sum(v.duration_ns for v in visits)
        speed = least * ratio / compute
        began = time.process_time()
        plan = ResidencyPlan.compile(states, visits, room, HostLink(1e9 * speed, 1e9 * speed))
        spent = time.process_time() - began
        copied = bound(plan, HostLink(1e9 * speed, 1e9 * speed))
        period = (
            plan.simulate(HostLink(1e9 * speed, 1e9 * speed)).time_ns if plan.rules else compute
        )
        floor, hidden, ratio = (
            max(compute, copied),
            1 - (period - compute) / copied,
            compute / copied,
        )
        rows.append((ratio, period / floor, hidden, spent))
    print(
        "| compute / copies | cases | within 1.1 | median | worst | copies hidden, median | least |"
    )
    print("|---|---|---|---|---|---|---|")
    for low, high in RANGES:
        some = [row for row in rows if low <= row[0] < high]
        if some:
            over, hidden = ([row[k] for row in some] for k in (1, 2))
            print(
                f"| {low}-{high} | {len(some)} | {sum(x <= 1.1 for x in over) / len(some):.0%} "
                f"| {statistics.median(over):.3f} | {max(over):.3f} "
                f"| {statistics.median(hidden):.0%} | {min(hidden):.0%} |"
            )
    seconds = [row[3] for row in rows]
    print(
        f"\n{sum(row[1] > 1.1 for row in rows)} of {len(rows)} not within 1.1; CPU seconds a plan: "
        f"median {statistics.median(seconds):.2f}, most {max(seconds):.2f}"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table")
    commands.add_parser("family").add_argument("--cases", type=int, default=300)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    if options.command == "table":
        table()
    else:
        family(options.cases)


if __name__ == "__main__":
    main()
