"""Plans: order, rolling rule, liveness and the sentences for documents that cannot be run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from arraypipe_plans import random_array, random_rolling, walk
from depth import depth
from hypothesis import given
from hypothesis import strategies as st

from optsched import Csr, CyclicOrder, InputError, JobArray, Resource, Schedule, verify
from optsched.arraypipe import compile_plan, random_schedule
from optsched.arraypipe.memory.budget import budget
from optsched.arraypipe.plan.plan import topological, without
from optsched.solving.result import PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe import ExecutionPlan


@st.composite
def random_orders(draw: st.DrawFn) -> Schedule:
    """A feasible order of a small job array, all kinds of blocks."""
    counts = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    n_stages = draw(st.integers(1, 3))
    devices = draw(st.integers(1, n_stages))
    jobs = range(len(counts))
    return random_schedule(
        counts,
        n_stages,
        place=[s % devices for s in range(n_stages)],
        recompute=draw(st.sets(st.sampled_from(jobs))),
        update=draw(st.sets(st.sampled_from(jobs))),
        seed=draw(st.integers(0, 10**6)),
    )


def changed(schedule: Schedule, **fields: Any) -> Schedule:
    """The schedule with some fields replaced."""
    return dataclasses.replace(schedule, **fields)


@given(random_orders(), st.data())
def test_every_instance_once_after_all_it_waits_for(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Unrolling gives each block of each iteration once, after its producers, in device order."""
    plan = compile_plan(schedule)
    lengths = [data.draw(st.integers(0, 3)) for _ in plan.microbatches]
    order = list(walk(plan, lengths))
    expected = Counter({(b.operation, t): 1 for b in plan.blocks for t in range(lengths[b.job])})
    assert Counter((i.operation, i.iteration) for i in order) == expected
    place = {(i.operation, i.cycle): k for k, i in enumerate(order)}
    for k, instance in enumerate(order):
        for arc in plan.waits[instance.operation]:
            assert place.get((arc.tail, instance.cycle - arc.tokens), -1) < k
    position = {i: p for row in plan.sequences for p, i in enumerate(row)}
    for device in range(len(plan.devices)):
        turns = [
            (i.cycle, position[i.operation])
            for i in order
            if plan.blocks[i.operation].device == device
        ]
        assert turns == sorted(turns)


BASE = random_schedule([1, 2], 2, update=[1], seed=1)


def label(field: str, i: int, value: Any) -> Schedule:
    """BASE with one label changed."""
    column = getattr(BASE, field).copy()
    if field == "kind":
        column = column.astype("<U8")
    column[i] = value
    return changed(BASE, **{field: column})


def order(edit: Any) -> Schedule:
    """BASE with its sequences edited in place."""
    assert BASE.sequences is not None
    rows = BASE.sequences.to_lists()
    edit(rows)
    return changed(BASE, sequences=Csr.of(rows))


HOSTILE: dict[str, tuple[Any, str]] = {
    "no schedule": (lambda: "x.json", r"schedule: expected a Schedule, got 'x\.json'"),
    "unscheduled": (lambda: BASE.graph(), "not scheduled"),
    "split backward I": (lambda: label("kind", 2, "I"), "I blocks on stage 1 without W blocks"),
    "split backward W": (lambda: label("kind", 2, "W"), "is missing"),
    "unknown kind": (lambda: label("kind", 0, "epoch"), r"operations\[0\].kind: expected F"),
    "missing job": (lambda: changed(BASE, job=BASE.job * 2), "no block of job 1"),
    "huge job": (lambda: label("job", 0, 2**50), "no block of job 2"),
    "huge micro-batch": (lambda: label("microbatch", 0, 2**50), "no block of micro-batch 1"),
    "huge offset": (lambda: changed(label("offset", 0, 0), period=100, start=BASE.start % 100,
                                    offset=np.full(BASE.n_operations, 2**50)), "offset"),
    "doubled": (lambda: label("kind", 2, "F"), "is also operations"),
    "missing": (lambda: label("kind", 2, "R"), "is missing"),
    "missing update": (lambda: label("kind", BASE.n_operations - 1, "R"), "is missing|is also"),
    "two resources": (lambda: changed(BASE, op_resources=Csr.of(
        [[0, 1], *BASE.op_resources.to_lists()[1:]])), "holds 2 resources at once"),
    "no resource": (lambda: changed(BASE, op_resources=Csr.of(
        [[], *BASE.op_resources.to_lists()[1:]])), "holds no resource"),
    "two devices": (lambda: changed(BASE, op_resources=Csr.of(
        [[1], *BASE.op_resources.to_lists()[1:]])), "stays on one device"),
    "not listed": (lambda: order(lambda rows: rows[0].pop()), "is missing"),
    "listed twice": (lambda: order(lambda rows: rows[0].append(rows[0][0])), "appears twice"),
    "foreign": (lambda: order(lambda rows: rows[0].append(rows[1][0])), "does not use this"),
    "micro-batches": (lambda: order(lambda rows: rows[0].reverse()), "must ascend"),
    **{f"together {x}": (lambda x=x: (BASE, {"together": [x]}), f"together.*{words}")
       for x, words in ((0, 'update_mode="global"'), (2, "no job 2"))},
}  # fmt: skip


def test_refused_with_a_sentence() -> None:
    """All that cannot be run is refused, with the place and the reason."""
    for make, sentence in HOSTILE.values():
        made = make()
        schedule, options = made if isinstance(made, tuple) else (made, {})
        with pytest.raises(InputError, match=sentence):
            compile_plan(schedule, **options)


def test_memory_of_the_steady_state() -> None:
    """Held bytes are a prefix sum; too much, or a gain per cycle, is refused."""
    base = random_schedule([1, 1], 1, seed=3)
    forward = (base.kind == "F").astype(int) * 10
    backward = (base.kind == "B").astype(int) * 10
    resources = (Resource("gpu", 20),)
    kept = changed(base, resources=resources, acquire=forward, free=backward)
    both = changed(kept, sequences=Csr.of([[0, 2, 1, 3]]))
    compile_plan(both)
    with pytest.raises(InputError, match="needs 21 bytes in all, the device has 20"):
        compile_plan(changed(both, workspace=(base.kind == "B").astype(int)))
    with pytest.raises(InputError, match="gains 20 bytes"):
        compile_plan(changed(kept, free=backward * 0))


@given(st.integers(0, 10**6), st.lists(st.integers(1, 2), min_size=1, max_size=3))
def test_held_is_the_peak_of_a_long_run(seed: int, copies: list[int]) -> None:
    """Bytes held over one cycle of the steady state are the most that a long run ever holds."""
    n = len(copies)
    array = JobArray(
        np.full((n, 2), 1), 2, activation=[[j + 1, 10 * (j + 1)] for j in range(n)],
        multiplicity=copies, place=[0, seed % 2], micro_batches=1 + seed % 3, objective="period",
    )  # fmt: skip
    schedule = random_rolling(array, seed=seed)
    plan = compile_plan(schedule)
    peak, level = [0] * len(plan.devices), [0] * len(plan.devices)
    for operation, _, _ in walk(plan, [8 * a for a in copies]):
        device = plan.blocks[operation].device
        level[device] += int(schedule.acquire[operation])
        peak[device] = max(peak[device], level[device])
        level[device] -= int(schedule.free[operation])
    assert peak == [budget(plan, d, {}).activations for d in range(len(plan.devices))]
    assert not any(level)
    assert max(plan.latest) == schedule.offset.max()


def test_together_adds_arcs() -> None:
    """Updates of such a job wait for the gradient of all stages."""
    schedule = random_schedule([1, 1], 2, update=[0])
    plan = compile_plan(schedule, together=[0])
    assert plan.together == {0}
    last = next(b.operation for b in plan.blocks if b[1:4] == ("B", 0, 0))
    updates = {b.operation for b in plan.blocks if b.kind == "U"}
    assert updates == {a.head for a in plan.arcs if a.tail == last and a.head in updates}
    # operations of a job: F0 F1 B1 B0 U0 U1; the update of stage 1 stands before B1 of job 1
    crossed = changed(schedule, sequences=Csr.of([[0, 6, 9, 3, 4], [1, 2, 5, 7, 8]]))
    compile_plan(crossed)
    with pytest.raises(CyclicOrder, match="U of job 0, stage 1"):
        compile_plan(crossed, together=[0])


def test_planning_needs_no_torch() -> None:
    """Plans, profiles, advice need no torch; without it the trainer says what to install."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from optsched import MissingExtra\n"
        "from optsched.arraypipe import Profile, advise, compile_plan, random_schedule\n"
        "import optsched.arraypipe.memory.budget, optsched.arraypipe.memory.transfers\n"
        "compile_plan(random_schedule([1, 2], 3))\n"
        "profile = Profile.read('instances/profiles/gpt2_xl-4.profile.json')\n"
        "assert profile.problem().n_stages == 4 and advise(profile).jobs == 4\n"
        "import optsched.arraypipe as a\n"
        "for name in ('Job', 'ArrayTrainer', 'RunConfig'):\n"
        "    try:\n"
        "        getattr(a, name)\n"
        "    except MissingExtra as error:\n"
        "        assert '.[torch]' in str(error)\n"
        "    else:\n"
        "        raise SystemExit(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# liveness: against runs of many cycles that know nothing of tokens

CYCLES = 24


def plans(seeds: range) -> Iterator[tuple[Schedule, bool]]:
    """Random periodic documents, most of them spoilt, and whether a run of them comes to a halt."""
    for seed in seeds:
        draw = Random(seed)
        schedule = _spoilt(_rolling(draw, seed), draw)
        yield schedule, _halts(schedule)


def _rolling(draw: Random, seed: int) -> Schedule:
    array = random_array(draw, draw.randint(1, 3), "period")
    found = random_rolling(array, spread=draw.randint(0, 2), seed=seed)
    return dataclasses.replace(found, provenance={"global": array.update_mode == "global"})


def _spoilt(schedule: Schedule, draw: Random) -> Schedule:
    """Cycles that begin elsewhere, neighbours exchanged, offsets one more or less."""
    assert schedule.sequences is not None
    rows, offset = schedule.sequences.to_lists(), schedule.offset.copy()
    for k, row in enumerate(rows):
        if draw.random() < 0.3:  # the same run, but now with arcs of negative tokens
            cut = draw.randrange(len(row) + 1)
            offset[row[cut:]] += 1
            rows[k] = row[cut:] + row[:cut]
    for _ in range(draw.choice([0, 0, 1, 2])):
        row = draw.choice(rows)
        if len(row) > 1:
            k = draw.randrange(len(row) - 1)
            row[k], row[k + 1] = row[k + 1], row[k]
    for _ in range(draw.choice([0, 0, 0, 2])):
        i = draw.randrange(len(offset))
        offset[i] = max(0, offset[i] + draw.choice([-1, 1]))
    return dataclasses.replace(schedule, sequences=Csr.of(rows), offset=offset, objective=None)


def _halts(schedule: Schedule) -> bool:
    """Whether a run of many cycles gets stuck by what training needs: no arcs, no tokens."""
    assert schedule.sequences is not None
    columns = (schedule.kind, schedule.job, schedule.stage, schedule.microbatch, schedule.iteration,
               schedule.offset)  # fmt: skip
    blocks = list(zip(*(c.tolist() for c in columns), strict=True))
    copies, micro, stages = Counter[int](), Counter[int](), max(b[2] for b in blocks) + 1
    for _, job, _, m, copy, _ in blocks:
        copies[job] = max(copies[job], copy + 1)
        micro[job] = max(micro[job], m + 1)
    there = {b[:3] for b in blocks}
    lists = []
    for row in schedule.sequences.to_lists():
        turns = [((c - blocks[i][5]) * copies[blocks[i][1]] + blocks[i][4], blocks[i])
                 for c in range(CYCLES + 6) for i in row]  # fmt: skip
        lists.append([
            (kind, j, s, 0 if kind == "U" else m, t)
            for t, (kind, j, s, m, _, _) in turns if 0 <= t < CYCLES * copies[j]
        ])  # fmt: skip

    def needs(
        kind: str, j: int, s: int, m: int, t: int
    ) -> Iterator[tuple[str, int, int, int, int]]:
        last = micro[j] - 1
        if kind == "F":
            if s:
                yield "F", j, s - 1, m, t
            if m:
                yield "F", j, s, m - 1, t
            if t:
                yield ("U", j, s, 0, t - 1) if ("U", j, s) in there else ("B", j, s, last, t - 1)
        elif kind == "R":
            yield "F", j, s, m, t
        elif kind == "B":
            yield "R" if ("R", j, s) in there else "F", j, s, m, t
            if s + 1 < stages:
                yield "B", j, s + 1, m, t
            if m:
                yield "B", j, s, m - 1, t
        else:
            yield "B", j, s, last, t
            if schedule.provenance.get("global"):
                yield "B", j, 0, last, t

    done: set[tuple[str, int, int, int, int]] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for d, line in enumerate(lists):
            while at[d] < len(line) and all(need in done for need in needs(*line[at[d]])):
                done.add(line[at[d]])
                at[d] += 1
                moved = True
    return any(k < len(line) for k, line in zip(at, lists, strict=True))


def _agree(seeds: range) -> Counter[str]:
    """How many random plans were live, dead, refused for another reason, or had a debt."""
    seen = Counter[str]()
    for schedule, halts in plans(seeds):
        try:
            plan = compile_plan(schedule)
        except CyclicOrder as error:
            assert halts, error
            seen["dead"] += 1
        except InputError as error:
            assert "micro-batches of a stage must ascend" in str(error)
            seen["micro-batches"] += 1
        else:
            assert not halts
            seen["live"] += 1
            seen["debt"] += min(arc.tokens for arc in plan.arcs) < 0
            counts = [3] * plan.n_jobs
            per_iteration = Counter((b.job, b.copy) for b in plan.blocks)
            expected = sum(per_iteration[j, 0] * n for j, n in enumerate(counts))
            run = list(walk(plan, counts))
            assert len(run) == expected  # the walk does not halt either
            for b, cycle, iteration in ((plan.blocks[i], c, t) for i, c, t in run):
                assert iteration == (cycle - b.offset) * plan.copies[b.job] + b.copy
    return seen


def test_compile_refuses_exactly_the_plans_that_halt() -> None:
    """Random periodic plans with offsets and copies: live iff 24 cycles run to their end."""
    n = depth(300, 2600)
    seen = _agree(range(n))
    assert seen["live"] > n / 4 and seen["dead"] > n / 7 and seen["debt"] > n / 20


# jobs deleted from schedules


SEEDS = st.integers(0, 10**6)


def random_document(seed: int) -> tuple[JobArray, Schedule]:
    """An array and a feasible schedule of it, periodic or not, with just enough memory."""
    draw = Random(seed)
    array = random_array(draw, draw.randint(2, 5), draw.choice(["period", "makespan"]))
    if array.objective == "period":
        schedule = random_rolling(array, seed=seed)
    else:
        graph = array.graph()
        arcs = zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True)
        order = topological(graph.n_operations, arcs, draw)
        rows = [sorted(row, key=order.index) for row in graph.users.to_lists()]
        schedule = array.scheduled(Csr.of(rows))
    plan, resources = compile_plan(schedule), []
    for d, resource in enumerate(schedule.resources):
        held = budget(plan, d, {}).activations
        resources.append(resource._replace(memory=held + draw.choice([0, 5])))
    return array, dataclasses.replace(schedule, resources=tuple(resources), objective=None)


def length(schedule: Schedule) -> int:
    """Period or makespan."""
    return schedule.period or schedule.makespan


def laps(plan: ExecutionPlan, names: list[int], jobs: list[int]) -> list[list[tuple[Any, ...]]]:
    """What every device repeats of some jobs, by the names given to all, from the least block on.

    Where a cycle begins is a matter of words: re-timing may turn it on one device.
    """
    rows = []
    for sequence in plan.sequences:
        blocks = [b for b in (plan.blocks[i] for i in sequence) if names[b.job] in jobs]
        row = [(b.kind, names[b.job], b.stage, b.microbatch, b.copy) for b in blocks]
        k = row.index(min(row)) if row else 0
        rows.append(row[k:] + row[:k])
    return rows


@given(SEEDS)
def test_deletion_keeps_feasible_and_order_and_never_lengthens(seed: int) -> None:
    """Without some jobs: verified, not longer, the others in their order, the smaller instance."""
    array, schedule = random_document(seed)
    assert not verify(schedule)
    draw = Random(seed)
    gone = draw.sample(range(array.n_jobs), draw.randint(1, array.n_jobs - 1))
    left = [j for j in range(array.n_jobs) if j not in gone]
    small = without(schedule, gone)
    assert not verify(small)
    assert length(small) <= length(schedule)
    before = laps(compile_plan(schedule), list(range(array.n_jobs)), left)
    assert laps(compile_plan(small), left, left) == before
    memory = [resource.memory for resource in schedule.resources]
    instance = array.replace(memory=memory).subset(left)
    orders = small.sequences
    assert orders is not None
    start = instance.scheduled(
        orders if small.period is None else PeriodicOrders(orders, small.offset)
    )
    instance.answer(start)  # raises if it is no feasible schedule of the instance
    assert length(start) == length(small)


def test_families_that_are_no_jobs_stay() -> None:
    """Setups between batch sizes, say: the numbers of the families mean something else."""
    schedule = random_schedule([1, 1, 1], 2)
    other = dataclasses.replace(schedule, family=schedule.job % 2 + 5)
    assert set(without(other, [0]).family.tolist()) == {5, 6}
    assert set(without(dataclasses.replace(schedule, family=schedule.job), [0]).family) == {0, 1}


def test_refused_repairs() -> None:
    """What cannot be deleted is refused with a sentence."""
    base = random_schedule([1, 1], 2)
    for schedule, jobs, sentence in (
        (base, [2], "jobs: the schedule has no job 2"),
        (base, [True], "no job True"),
        (base, [0, 1], "none would be left of 2"),
        (base.graph(), [0], "not scheduled"),
    ):
        with pytest.raises(InputError, match=sentence):
            without(schedule, jobs)
