"""What solvers answer while nothing is compiled: arrays of every kind, by rules and by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from uncompiled import never_load, uncompile

import optsched
from optsched import InputError, JobArray, pipelines
from optsched.kernels import cycle_ratio, list_schedule
from optsched.pipelines.generator import job_array
from optsched_solvers.shop.hand_made import NAMES

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "caps": {"memory": "80GB", "recompute": True},
    "chosen": {"memory": "80GB", "recompute": "choose"},
    "setups": {"switch": True, "memory": "80GB", "recompute": True},
    "in flight": {"in_flight": True},
    "cut": {"memory": "80GB", "recompute": True, "micro_batches": 2},
}


def zeros(objective: str) -> JobArray:
    """Blocks of no time among others, and little memory."""
    forward, backward, size = np.random.default_rng(1).integers(0, 4, (3, 8, 4))
    return JobArray(
        forward, backward, activation=size + 1, memory=[9, 9, 9, 9], objective=objective
    )


def arrays(objective: str) -> dict[str, JobArray]:
    """One of every kind."""
    made = {
        kind: job_array("gpt2_xl", 8, 8, objective=objective, **options)
        for kind, options in KINDS.items()
    }
    return made | {"zeros": zeros(objective)}


def by_hand(array: JobArray) -> int:
    """The best hand-made order that fits."""
    if array.chooses:
        array = array.replace(recompute_mode="always")
    found = []
    for name in NAMES:
        with suppress(InputError):
            schedule = getattr(pipelines, name)(array)
            array.answer(schedule)
            found.append(schedule.period or schedule.makespan)
    return min(found)


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_first_answers_need_no_kernel(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified schedule, no worse than the best order made by hand, and no kernel called."""
    given = arrays(objective)
    least = {kind: by_hand(array) for kind, array in given.items()}
    ruled = {
        kind: optsched.solve(array, "dispatch", iterations=1).objective
        for kind, array in given.items()
        if objective == "makespan" and not array.chooses
    }
    uncompile(monkeypatch, list_schedule, cycle_ratio)
    never_load(monkeypatch)
    for kind, array in given.items():
        found = optsched.solve(array, time_limit=0.3)
        assert found.objective is not None and found.objective <= least[kind], kind
        assert found.objective <= ruled.get(kind, least[kind]), kind


def test_a_large_array_gets_the_order_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than rules can do in Python, as memory is limited."""
    array = job_array("gpt2_xl", 8, 80, memory="80GB", recompute=True)
    least = by_hand(array)
    uncompile(monkeypatch, list_schedule)
    never_load(monkeypatch)
    found = optsched.solve(array, time_limit=0.5)
    assert found.objective == least
    assert found.history[-1].source.startswith("pipelines.")


@pytest.mark.parametrize("solver", ["auto", "dispatch"])
def test_counted_answers_do_not_depend_on_what_is_compiled(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an iteration limit the same schedule comes by the same way."""
    given = [zeros("makespan"), zeros("period"), job_array("gpt2_xl", 8, 8, **KINDS["caps"])]
    if solver == "auto":
        given[-1] = zeros("makespan").replace(recompute=1, recompute_mode="choose")

    def answers() -> list[object]:
        found = [
            optsched.solve(array, solver, iterations=n % 2 * 3) for n, array in enumerate(given)
        ]
        return [(r.schedule, [(e.objective, e.source) for e in r.history]) for r in found]

    warm = answers()
    never_load(monkeypatch, "loaded")
    assert answers() == warm
