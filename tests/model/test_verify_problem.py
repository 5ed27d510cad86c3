"""Whether a schedule solves this very instance, and claims no more than is true of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from oracles.best_gpus import subset_problems
from oracles.best_quota import quota_problems

import optsched
from optsched import JobArray, JobShop, Objective, Schedule, verify
from optsched.bandwidth.topology.policy import Policy
from optsched.model.difference import difference
from optsched.model.schedule import Arcs, Csr

if TYPE_CHECKING:
    from program import Cli

    from optsched.model.schedule import Problem

SHOP = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
ARRAY = JobArray(
    [[3, 3], [5, 5]], [[6, 6], [9, 9]], switch=2, lag_forward=1, activation=4, memory=[8, 4],
    recompute=1, checkpoint=1,
)  # fmt: skip
CHOOSING = ARRAY.replace(recompute_mode="choose")


def solved(problem: Problem, solver: str = "auto") -> Schedule:
    """A schedule of a problem."""
    found = optsched.solve(problem, solver, iterations=20).schedule
    assert found is not None
    return found


@pytest.mark.parametrize(
    "problem",
    [SHOP, SHOP.graph(), ARRAY, ARRAY.with_objective("period"), CHOOSING],
    ids=["shop", "graph", "array", "period", "recomputation to be chosen"],
)
def test_every_answer_solves_its_problem(problem: Problem) -> None:
    """By itself, and as a file."""
    schedule = solved(problem)
    assert verify(schedule, problem) == []
    assert verify(schedule, problem=problem) == verify(schedule) == []


def test_answers_without_orders_solve_their_problems() -> None:
    """Quotas and choices of GPUs: rules and values that no document of a schedule holds."""
    for problem in [*quota_problems(20), *subset_problems(12)]:
        found = optsched.solve(problem, iterations=50).schedule
        if found is None:
            continue
        assert verify(found, problem) == [], problem.name
        value = problem.evaluate(found)
        claim = Objective(problem.objective_name, value + 1, None, "feasible")
        wrong = found.with_orders(found.sequences, found.start, claim)  # type: ignore[arg-type]
        (one,) = verify(wrong, problem)
        assert (one.kind, one.amount) == ("objective", 1), problem.name
        claim = Objective(problem.objective_name, None, value + 3)
        wrong = found.with_orders(found.sequences, found.start, claim)  # type: ignore[arg-type]
        (one,) = verify(wrong, problem)
        assert (one.kind, one.amount) == ("objective", 3), problem.name
        claim = Objective("beauty", value + 2, value + 1, "feasible")  # of another objective
        wrong = found.with_orders(found.sequences, found.start, claim)  # type: ignore[arg-type]
        (one,) = verify(wrong, problem)
        assert (one.kind, one.amount) == ("objective", 0), problem.name
        assert [v.kind for v in verify(found, SHOP)][-1:] == ["instance"]


def test_any_other_number_of_the_instance_is_noticed() -> None:
    """Whichever field of the graph differs, the message names its place and both values."""
    rng = random.Random(1)
    for problem in (ARRAY, ARRAY.with_objective("period"), SHOP.graph(), CHOOSING):
        schedule = solved(problem)
        for key in (
            "duration", "job", "stage", "family", "setup_in", "setup_out", "acquire", "free",
            "workspace", "kind", "arcs",
        ):  # fmt: skip
            i = rng.randrange(schedule.n_operations)
            if key == "arcs":
                i = rng.randrange(len(schedule.arcs.tail))
                lag = schedule.arcs.lag.copy()
                lag[i] += 1
                other = replace(schedule, arcs=Arcs(*schedule.arcs[:2], lag, schedule.arcs[3]))
            else:
                column = getattr(schedule, key).copy()
                column[i] = "X" if key == "kind" else column[i] + 1
                other = replace(schedule, **{key: column})
            kinds = {v.kind: v.message for v in verify(other, problem)}
            place = f"arcs[{i}]" if key == "arcs" else f"operations[{i}].{key}"
            assert "instance" in kinds and place in kinds["instance"], (problem, key, kinds)
            assert difference(other, schedule).startswith(place)


def test_differences_in_words() -> None:
    """Sizes, names, units, windows and resources; orders alone are none."""
    graph = SHOP.graph()
    assert difference(solved(SHOP), graph) == ""
    for other, words in (
        (JobShop([[(0, 3), (1, 2)]], ["0", "1"]), "number of operations: 2, expected 4"),
        (JobShop(SHOP.jobs, ["a", "1"]), 'resources[0].name: "a", expected '),
        (JobShop(SHOP.jobs, time_unit="ms"), 'has the time unit "ms", expected ""'),
        (JobShop(SHOP.jobs, deadline=[9, None]), "operations[1].deadline: 9, expected none"),
        (
            JobShop([[(1, 3), (0, 2)], [(1, 4), (0, 1)]]),
            "operations[0].resources: [1], expected [0]",
        ),
        (ARRAY.with_objective("period"), "has the period "),
    ):
        assert difference(other.graph(), graph).startswith(words)


def test_the_hash_of_the_instance() -> None:
    """It is named where graphs differ; one that fits betrays a graph that was changed."""
    schedule, other = solved(SHOP), SHOP.reversed()
    (one,) = verify(schedule, other)
    assert one.kind == "instance" and SHOP.sha256[:12] in one.message
    assert other.sha256[:12] in one.message
    changed = replace(schedule, duration=np.array([3, 2, 4, 0]), objective=None)
    assert "names this instance" in verify(changed, SHOP)[-1].message
    # another name is another document of the same graph
    assert verify(solved(ARRAY), ARRAY.replace(name="siblings")) == []


def test_bounds_of_another_document_are_no_bounds() -> None:
    """What recomputation makes of it is not in the graph: a bound holds for one document only."""
    fixed = CHOOSING.replace(recompute_mode=[False, False])
    schedule = solved(fixed)
    said = {**schedule.provenance, "recompute": [False, False]}
    schedule = schedule.with_orders(
        schedule.sequences, schedule.start, schedule.objective, said  # type: ignore[arg-type]
    )  # fmt: skip
    (one,) = verify(schedule, CHOOSING)
    assert one.kind == "objective" and "another instance" in one.message
    claim = schedule.objective._replace(lower_bound=None, status="feasible")  # type: ignore[union-attr]
    bare = schedule.with_orders(schedule.sequences, schedule.start, claim)  # type: ignore[arg-type]
    assert verify(bare, CHOOSING) == []


def test_bounds_of_a_graph_hold_for_every_document_of_it() -> None:
    """Those of quotas and GPUs depend on data outside of the graph: they need the same hash."""
    for problem in (SHOP, SHOP.graph(), ARRAY, ARRAY.with_objective("period")):
        assert verify(proved_for_another(problem), problem) == []
    for problem in (*quota_problems(9), *subset_problems(4)):
        if optsched.solve(problem, iterations=50).schedule is not None:
            (one,) = verify(proved_for_another(problem), problem)
            assert (one.kind, one.amount) == ("objective", 0) and "000000000000" in one.message


def proved_for_another(problem: Problem) -> Schedule:
    """A schedule with a true bound, of a document with another hash."""
    found = solved(problem)
    claim = Objective(problem.objective_name, None, problem.lower_bound())
    other = {"instance_sha256": "0" * 64}
    return found.with_orders(found.sequences, found.start, claim, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("problem", [SHOP, ARRAY, ARRAY.with_objective("period")])
def test_a_wrong_claim_is_listed_once(problem: Problem) -> None:
    """With and without the problem."""
    found = solved(problem)
    best = problem.evaluate(found)
    claim = Objective(problem.objective_name, best + 2, best + 1, "feasible")
    wrong = found.with_orders(found.sequences, found.start, claim)  # type: ignore[arg-type]
    assert [(v.kind, v.amount) for v in verify(wrong)] == [("objective", 2), ("objective", 1)]
    assert verify(wrong, problem) == verify(wrong)


def test_all_broken_rules_of_a_problem_are_listed() -> None:
    """A request with too few GPUs, one of them taken: both, though the answer has no value."""
    problem = next(p for p in subset_problems(30) if p.k > 1 and p.state.jobs)
    found = optsched.solve(problem.changed(policy=Policy())).schedule
    assert found is not None
    rows = found.op_resources.to_lists()
    rows[-1] = rows[0][:1]
    broken = replace(found, op_resources=Csr.of(rows), objective=None)
    listed = [v for v in verify(broken, problem) if v.kind == "instance"]
    assert [v.message for v in listed] == problem.check(broken)
    assert len(listed) >= 2 and {v.amount for v in listed} == {0}


def test_messages_of_other_instances_have_one_subject() -> None:
    """Whatever the problem, they begin with "the schedule"."""
    plan, request = quota_problems(1)[0], subset_problems(1)[0]
    for schedule, problem in (
        (solved(SHOP), ARRAY), (solved(ARRAY), ARRAY.with_objective("period")),
        (solved(SHOP), plan), (solved(SHOP), request),
    ):  # fmt: skip
        (message,) = [v.message for v in verify(schedule, problem) if v.kind == "instance"]
        assert message.startswith("the schedule ") and message.count("the schedule") == 1


# on the command line


def test_one_instance_for_all_files(cli: Cli) -> None:
    """Each is held against it; the worst decides the exit code."""
    SHOP.write("shop.json")
    SHOP.reversed().write("other.json")
    solved(SHOP).write("a.schedule.json")
    solved(SHOP.reversed()).write("b.schedule.json")
    ran = cli("verify", "a.schedule.json", "--problem", "shop.json")
    assert ran.code == 0 and ran.out.startswith("a.schedule.json: solves shop.json, 4 operations")
    assert "not given" not in ran.out
    ran = cli("verify", "--problem", "shop.json", "a.schedule.json", "b.schedule.json")
    assert ran.code == 1
    first, second = ran.out.splitlines()
    assert first.startswith("a.schedule.json: solves shop.json")
    assert second == "b.schedule.json: does not solve shop.json, 1 violation"
    ran = cli("verify", "b.schedule.json", "--problem", "shop.json")
    assert ran.code == 1 and ran.out.startswith("instance: the schedule belongs to another")
    assert cli.refused("verify", "a.schedule.json", "--problem", "none.json").startswith(
        "none.json"
    )


def test_rolling_schedules_of_an_array(cli: Cli) -> None:
    """The same file holds both questions: which one is asked is said as it was said to `solve`."""
    ARRAY.write("array.json")
    solved(ARRAY.with_objective("period")).write("r.schedule.json")
    ran = cli("verify", "r.schedule.json", "--problem", "array.json")
    assert ran.code == 1 and 'objective="period"' in ran.out
    ran = cli("verify", "r.schedule.json", "--problem", "array.json", "--objective", "period")
    assert ran.code == 0 and "solves array.json" in ran.out
    assert "--problem" in cli.refused("verify", "r.schedule.json", "--objective", "period")
