"""Does `advise` name the winner? Blocks are measured, alternatives run, and answers compared.

    $ python -m benchmarks.executor.advise_cases [--only NAME] [--simulated]

Blocks of a case sleep (or multiply matrices, "compute"); their times are measured and make the
profile that `advise` gets. Every alternative is then simulated, block by block with the measured
times, by code that shares nothing with `advise` but the orders of `optsched.pipelines`: one job per
device, 1F1B and interleaved with every number of micro-batches and every grouping of devices, the
job array by a greedy rule, and FSDP with two streams. The two fastest are run in real time where
blocks sleep: one thread per device, real waits for blocks and messages. (FSDP and compute blocks
stay simulated: threads cannot compute on more devices than there are cores.) Memory is arithmetic:
an alternative is left out if `advise` says that it does not fit, and numbers of micro-batches by a
rough count here. Device memory, states and links are numbers of the case, not measured.

A case counts if the fastest alternative leads by more than 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.executor.advise_case import CASES, GB, Case, measured, until
from benchmarks.machine import machine
from optsched import JobArray, pipelines
from optsched.arraypipe.advice import advise

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.profiling.document import (
        Profile,
    )

LEAD = 1.10


def main() -> None:
    """Print one row per case and how many answers are right."""
    parser = argparse.ArgumentParser(description="Does advise name the winner?")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--simulated", action="store_true", help="run nothing in real time")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in case.name]
    if not cases:
        names = "".join(f"\n  {case.name}" for case in CASES)
        parser.error(f"--only: no case has {given.only!r} in its name; there are{names}")
    print(machine("numba"))
    print("\n| case | winner | s / round | next | lead | how | advise | its s / round | right |")
    print("|---|---|--:|---|--:|---|---|--:|---|")
    right = counted = 0
    for case in cases:
        clear, good = _row(case, given.simulated)
        counted += clear
        right += clear and good
    print(f"\n{right} of {counted} clear cases (lead above {LEAD - 1:.0%}) are named rightly.")


def _row(case: Case, simulated: bool) -> tuple[bool, bool]:
    profile = measured(case)
    advice = advise(profile, devices=case.devices, memory=int(case.memory * GB))
    fitting = {option.name for option in advice.options if option.counts}
    plans = sorted(
        (plan for plan in alternatives(case, profile) if plan.name in fitting),
        key=lambda plan: plan.seconds,
    )
    first: dict[str, Plan] = {}
    for plan in plans:
        first.setdefault(plan.name, plan)
    ranked = list(first.values())
    how = "simulated"
    if not simulated and not case.compute:
        real = [
            plan._replace(seconds=statistics.median(plan.run() for _ in range(3)))
            if plan.run
            else plan
            for plan in ranked[:2]
        ]
        how = "run" if all(plan.run for plan in ranked[:2]) else "run, simulated"
        ranked = sorted([*real, *ranked[2:]], key=lambda plan: plan.seconds)
    winner, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    lead = second.seconds / winner.seconds if second else float("inf")
    best = advice.best
    assert best is not None
    good = best.name == winner.name
    clear = lead > LEAD
    print(
        f"| {case.name} | {winner.name} | {winner.seconds:.4f} | {second.name if second else '-'} "
        f"| {lead:.2f} | {how} | {best.name}{' (close)' * advice.too_close} "
        f"| {best.seconds:.4f} | {('no', 'yes')[good] if clear else 'not clear'} |",
        flush=True,
    )
    return clear, good


# the profile


class Block(NamedTuple):
    """A block on a device; `seconds` long."""

    pipeline: int
    job: int
    iteration: int
    kind: str
    stage: int
    microbatch: int


class Plan(NamedTuple):
    """An alternative: seconds a round, and a function that measures it in real time."""

    name: str
    seconds: float
    run: Callable[[], float] | None


class Times(NamedTuple):
    """Seconds of blocks by (kind, size) for a stage, of an update, and of messages by size."""

    case: Case
    block: dict[tuple[str, int], float]
    update: float

    def of(self, kind: str, size: int, stages: float) -> float:
        """Seconds on so many stages in a row; sizes between measured ones are interpolated."""
        sizes = self.case.sizes
        return stages * float(np.interp(size, sizes, [self.block[kind, b] for b in sizes]))

    def lag(self, size: int) -> float:
        """Seconds of a message."""
        return 20e-6 + self.case.sent * size / self.case.bandwidth


def alternatives(case: Case, profile: Profile) -> list[Plan]:
    """Everything that is compared."""
    times = Times(
        case,
        {(b.kind, b.batch): b.median_ns / 1e9 for b in profile.blocks if b.kind != "U"},
        1e-6,
    )
    plans = [*_alone(times), _array(times)]
    groups = 1
    while case.devices // groups >= 2:
        width = min(case.devices // groups, case.stages)
        plans.append(_in_turn(times, "1F1B", width, case.devices // width, 1))
        if case.stages >= 2 * width:
            plans.append(_in_turn(times, "interleaved", width, case.devices // width, 2))
        plans.append(_fsdp(times, case.devices // groups, groups))
        groups *= 2
    return [plan for plan in plans if plan is not None]


def _alone(times: Times) -> list[Plan]:
    """One job per device, the longest first; and with jobs that move."""
    case = times.case
    each = []
    for batch in case.batches:
        options = [
            m
            * (
                times.of("F", -(-batch // m), case.stages)
                + times.of("B", -(-batch // m), case.stages)
            )
            for m in _counts(batch)
        ]
        each.append(min(options) + case.stages * times.update)
    lists = _longest_first(each, case.devices)

    def run() -> float:
        rows = [[(None, each[j]) for _ in range(_TURNS) for j in row] for row in lists]
        return _together(rows) / _TURNS

    plans = [Plan("one job per GPU", max(sum(each[j] for j in row) for row in lists), run)]
    if len(each) > case.devices > 1:
        plans.append(_moved(each, case.devices))
    return plans


def _moved(each: list[float], devices: int) -> Plan:
    """The same, but jobs change devices between iterations so that all end together (McNaughton).

    All iterations in a row, job after job, are cut into equal parts: a job that is cut is the last
    of one device and the first of the next.
    """
    line = [seconds for seconds in each for _ in range(_TURNS)]
    ends = list(accumulate(line))
    parts: list[list[float]] = [[] for _ in range(devices)]
    for seconds, end in zip(line, ends, strict=True):
        parts[min(devices - 1, int((end - seconds / 2) * devices / ends[-1]))].append(seconds)

    def run() -> float:
        return _together([[(None, seconds) for seconds in part] for part in parts]) / _TURNS

    return Plan("one job per GPU, moved", max(map(sum, parts)) / _TURNS, run)


def _in_turn(times: Times, name: str, width: int, groups: int, chunks: int) -> Plan | None:
    """One job after the other through each of several pipelines, each with its best M."""
    case = times.case
    ways = []
    for batch in case.batches:
        found = []
        for m in _counts(batch, width):
            orders = _orders(name, width, m, chunks)
            size, held = -(-batch // m), min(m, width * chunks)
            layers = case.stages / width
            if orders is not None and case.fits(layers, 0, layers * held * size):
                spec = _spec(times, batch, m, width, chunks)
                found.append((_period(orders, spec), m))
        if not found:
            return None
        ways.append(min(found))
    lists = _longest_first([way[0] for way in ways], groups)

    def run() -> float:
        queues: list[list[tuple[Block | None, float]]] = []
        spec: dict[int, Spec] = {}
        for group, row in enumerate(lists):
            mine: list[list[tuple[Block | None, float]]] = [[] for _ in range(width)]
            for j in row:
                m = ways[j][1]
                spec[j] = _spec(times, case.batches[j], m, width, chunks)
                orders = _orders(name, width, m, chunks)
                assert orders is not None
                for turn in range(_ROUNDS):
                    for d, order in enumerate(orders):
                        for kind, stage, micro in order:
                            block = Block(group, j, turn, kind, stage, micro)
                            mine[d].append((block, spec[j].seconds(block)))
            queues += mine
        return _together(queues, spec) / _ROUNDS

    return Plan(name, max(sum(ways[j][0] for j in row) for row in lists), run)


def _array(times: Times) -> Plan:
    """The job array as the jobs are, one micro-batch each: a greedy rule, rolling.

    If not all states fit, as many jobs as do, set after set.
    """
    case = times.case
    width = min(case.stages, case.devices)
    layers = -(-case.stages // width)
    room = 0.95 * case.memory - layers * case.state / 3 - 2 * layers * case.kept * sum(case.batches)
    most = max(1, int(room / (layers * case.state)))
    sets = -(-len(case.batches) // most)
    size = -(-len(case.batches) // sets)
    order = sorted(range(len(case.batches)), key=lambda j: -case.batches[j])
    lists = [order[k : k + size] for k in range(0, len(order), size)]
    spec = {j: _spec(times, b, 1, width, 1) for j, b in enumerate(case.batches)}
    rounds = 10
    made = [_greedy({j: spec[j] for j in row}, width, rounds) for row in lists]

    def run() -> float:
        total = 0.0
        for orders, _ in made:
            queues = [
                [(block, spec[block.job].seconds(block)) for block in order] for order in orders
            ]
            ends: dict[Block, float] = {}
            _together(queues, spec, ends)
            done = [max(t for b, t in ends.items() if b.iteration == r) for r in (2, rounds - 3)]
            total += (done[1] - done[0]) / (rounds - 5)
        return total

    return Plan("job array", sum(slope for _, slope in made), run)


def _fsdp(times: Times, width: int, groups: int) -> Plan | None:
    """Sharded data parallel with a compute and a message stream; gathers run one stage ahead."""
    case = times.case
    each = []
    for batch in case.batches:
        used = min(width, batch)
        weights = case.state * GB / 3
        ring = (used - 1) / used * weights / case.bandwidth + (used - 1) * 20e-6
        found = []
        share = -(-batch // used)
        for m in _counts(share):
            size = -(-share // m)
            if not case.fits(case.stages / used, 1, case.stages * size):
                continue
            forward, backward = times.of("F", size, 1), times.of("B", size, 1)
            link = device = 0.0
            for _ in range(m):
                for duration in [forward] * case.stages + [backward] * case.stages:
                    link = link + ring  # gather
                    device = max(device, link) + duration
                    if duration == backward:
                        link = max(link, device - duration) + ring  # scatter of the one before
            found.append(max(device, link) + times.update * case.stages / used)
        if not found:
            return None
        each.append(min(found))
    lists = _longest_first(each, groups)
    return Plan("FSDP", max(sum(each[j] for j in row) for row in lists), None)


# pipelines: orders, a simulation, and threads


class Spec(NamedTuple):
    """One job in a pipeline: virtual stages, micro-batches, and seconds of blocks and messages."""

    stages: int
    microbatches: int
    width: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: float
    lag: float

    def seconds(self, block: Block) -> float:
        """Duration of a block, the update in the last backward block."""
        if block.kind == "F":
            return self.forward[block.stage]
        last = block.microbatch == self.microbatches - 1
        return self.backward[block.stage] + self.update * last

    def before(self, block: Block) -> list[Block]:
        """Blocks on other devices (or of this one) that a block waits for."""
        s = block.stage
        if block.kind == "F":
            return [block._replace(stage=s - 1)] if s else []
        if s == self.stages - 1:
            return [block._replace(kind="F")]
        return [block._replace(stage=s + 1)]


_ROUNDS = 3
_TURNS = 12
_Order = list[list[tuple[str, int, int]]]


def _spec(times: Times, batch: int, m: int, width: int, chunks: int) -> Spec:
    case, count = times.case, width * chunks
    size = -(-batch // m)
    cuts = [v * case.stages // count for v in range(count + 1)]
    layers = [b - a for a, b in pairwise(cuts)]
    lag = times.lag(size) if width > 1 else 0.0
    return Spec(
        count, m, width, tuple(times.of("F", size, n) for n in layers),
        tuple(times.of("B", size, n) for n in layers), times.update, lag,
    )  # fmt: skip


def _orders(name: str, width: int, m: int, chunks: int) -> _Order | None:
    """The order of every device, as `optsched.pipelines` makes it."""
    try:
        array = JobArray([[1] * (width * chunks)], [[2] * (width * chunks)], micro_batches=m,
                         place=pipelines.wrapped(width, chunks))  # fmt: skip
        made = (pipelines.interleaved if chunks > 1 else pipelines.one_f_one_b)(array)
    except ValueError:
        return None
    return [
        [(str(made.kind[i]), int(made.stage[i]), int(made.microbatch[i])) for i in row]
        for row in made.sequences.to_lists()
    ]


def _period(orders: _Order, spec: Spec) -> float:
    """Seconds from one iteration to the next, when the order repeats."""
    ends: dict[Block, float] = {}
    queues = [
        [Block(0, 0, t, *block) for t in range(_ROUNDS + 1) for block in order] for order in orders
    ]
    free, at = [0.0] * len(queues), [0] * len(queues)
    while any(at[d] < len(queue) for d, queue in enumerate(queues)):
        for d, queue in enumerate(queues):
            while at[d] < len(queue):
                block = queue[at[d]]
                needs = spec.before(block)
                if any(need not in ends for need in needs):
                    break
                ready = max((ends[n] + _lag(spec, n, block) for n in needs), default=0.0)
                free[d] = ends[block] = max(free[d], ready) + spec.seconds(block)
                at[d] += 1
    done = [max(t for b, t in ends.items() if b.iteration == r) for r in (0, _ROUNDS)]
    return (done[1] - done[0]) / _ROUNDS


def _greedy(spec: dict[int, Spec], width: int, rounds: int) -> tuple[list[list[Block]], float]:
    """Orders of a job array by a rule: the oldest iteration first, backward before forward."""
    ends: dict[Block, float] = {}
    free = [0.0] * width
    orders: list[list[Block]] = [[] for _ in range(width)]
    waiting = {
        (j, s, kind): 0 for j in spec for s in range(width) for kind in "FB"
    }  # next iteration
    for _ in range(2 * width * rounds * len(spec)):
        best: tuple[tuple[float, ...], Block] | None = None
        for (j, s, kind), turn in waiting.items():
            if turn == rounds or (kind == "F" and waiting[j, s, "B"] < turn):
                continue
            block = Block(0, j, turn, kind, s, 0)
            needs = spec[j].before(block)
            if any(n not in ends for n in needs):
                continue
            ready = max((ends[n] + _lag(spec[j], n, block) for n in needs), default=0.0)
            begin = max(free[s], ready)
            key = (begin, turn, kind == "F", j)
            if best is None or key < best[0]:
                best = key, block
        assert best is not None
        block = best[1]
        free[block.stage] = ends[block] = best[0][0] + spec[block.job].seconds(block)
        orders[block.stage].append(block)
        waiting[block.job, block.stage, block.kind] += 1
    done = [max(t for b, t in ends.items() if b.iteration == r) for r in (2, rounds - 3)]
    return orders, (done[1] - done[0]) / (rounds - 5)


def _lag(spec: Spec, first: Block, second: Block) -> float:
    return 0.0 if first.stage == second.stage else spec.lag


def _together(
    queues: list[list[tuple[Block | None, float]]],
    spec: dict[int, Spec] | None = None,
    ends: dict[Block, float] | None = None,
) -> float:
    """Seconds that one thread per device takes for its blocks, which sleep."""
    found: dict[Block, float] = {} if ends is None else ends
    events = {b: threading.Event() for queue in queues for b, _ in queue if b is not None}
    start = threading.Barrier(len(queues) + 1)

    def work(queue: list[tuple[Block | None, float]]) -> None:
        start.wait()
        for block, seconds in queue:
            if block is not None and spec is not None:
                own = spec[block.job]
                for need in own.before(block):
                    events[need].wait()
                    until(found[need] + _lag(own, need, block))
            time.sleep(seconds)
            if block is not None:
                found[block] = time.perf_counter()
                events[block].set()

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def _longest_first(times: list[float], machines: int) -> list[list[int]]:
    lists: list[list[int]] = [[] for _ in range(machines)]
    load = [0.0] * machines
    for j in sorted(range(len(times)), key=lambda j: -times[j]):
        m = load.index(min(load))
        lists[m].append(j)
        load[m] += times[j]
    return lists


def _counts(batch: int, multiple: int = 1) -> list[int]:
    """Numbers of micro-batches: 1, 2, 4, ..., and multiples."""
    powers = list(accumulate([2] * (batch.bit_length() - 1), lambda a, b: a * b, initial=1))
    return sorted({m for p in powers for m in (p, p * multiple) if m <= batch})


if __name__ == "__main__":
    main()
