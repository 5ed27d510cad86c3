"""Liveness: the token test against runs of many cycles that know nothing of tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from arraypipe_plans import random_rolling, walk
from depth import depth

from optsched import CyclicOrder, JobArray, Rows, Schedule
from optsched.arraypipe import compile
from optsched.arraypipe.plan.liveness import token_free_cycle
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

CYCLES = 24


def test_long_negative_and_zero_cycles_are_found() -> None:
    """One arc too many in a ring of hundreds, with a debt that a whole ring must pay."""
    n = 400
    ring = [(i, (i + 1) % n, 0) for i in range(n)]
    assert sorted(token_free_cycle(n, ring, [])) == list(range(n))
    paid = [*ring[:-1], (n - 1, 0, 1)]
    assert token_free_cycle(n, paid, []) == []
    for debt in (-1, -2):
        owing = [*paid[:200], (200, 201, debt), *paid[201:]]
        assert sorted(token_free_cycle(n, owing, [])) == list(range(n))
    lent = [(0, 1, 3), *paid[1:200], (200, 201, -3), *paid[201:]]
    assert token_free_cycle(n, lent, []) == []
    assert token_free_cycle(n, [*paid, (7, 7, 0)], []) == [7]


def test_the_cycle_that_is_told_is_a_short_one() -> None:
    """Of a long cycle with a chord only the short way is reported."""
    ring = [(i, (i + 1) % 60, 0) for i in range(60)]
    found = token_free_cycle(60, [*ring, (2, 0, 0)], [])
    assert sorted(found) == [0, 1, 2]


def plans(seeds: range) -> Iterator[tuple[Schedule, bool]]:
    """Random periodic documents, most of them spoilt, and whether a run of them comes to a halt."""
    for seed in seeds:
        draw = Random(seed)
        schedule = _spoilt(_rolling(draw, seed), draw)
        yield schedule, _halts(schedule)


def _rolling(draw: Random, seed: int) -> Schedule:
    jobs, stages = draw.randint(1, 3), draw.randint(1, 3)
    array = JobArray(
        np.full((jobs, stages), 1), 2, recompute=1, update=1, recompute_as_block=True,
        recompute_mode=[draw.random() < 0.3 for _ in range(jobs)],
        update_mode=draw.choice(["fused", "block", "global"]),
        micro_batches=[draw.choice([1, 1, 2]) for _ in range(jobs)],
        multiplicity=[draw.choice([1, 1, 2]) for _ in range(jobs)],
        place=[s % draw.randint(1, stages) for s in range(stages)] if draw.random() < 0.3 else None,
        objective="period",
    )  # fmt: skip
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
    return dataclasses.replace(schedule, sequences=Rows.of(rows), offset=offset, objective=None)


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
            plan = compile(schedule)
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
            assert sum(1 for _ in walk(plan, counts)) == expected  # the walk does not halt either
    return seen


def test_compile_refuses_exactly_the_plans_that_halt() -> None:
    """Random periodic plans with offsets and copies: live iff 24 cycles run to their end."""
    n = depth(800, 2600)
    seen = _agree(range(n))
    assert seen["live"] > n / 4 and seen["dead"] > n / 7 and seen["debt"] > n / 20
