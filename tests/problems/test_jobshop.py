"""`JobShop`: values, graph, hash, mirror, refusals, and the instances shipped beside the code."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.util
import pickle
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import Csr, JobShop, Objective, Schedule
from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement import document as gpus_json
from optsched.errors import InputError
from optsched.formats import standard
from optsched.formats.read_problem import read_problem
from optsched.model.schedule import NO_DEADLINE
from optsched.problems.quota import document as quota_json

if TYPE_CHECKING:
    from types import ModuleType

INSTANCES = Path(__file__).parents[2] / "instances" / "jobshop"
TOY = [[(0, 3), (1, 2)], [(1, 4), (0, 1)]]


@st.composite
def shops(draw: st.DrawFn, classic: bool = False) -> JobShop:
    """Small shops: re-entrant chains, zero and huge durations, windows; or classic ones."""
    m = draw(st.integers(1, 5))
    n = draw(st.integers(1, 5))
    times = st.one_of(st.integers(0, 9), st.integers(0, 2**46))
    if classic:
        rows = [draw(st.permutations(range(m))) for _ in range(n)]
    else:
        rows = [draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=7)) for _ in range(n)]
    jobs = [[(k, draw(times)) for k in row] for row in rows]
    windows: dict[str, Any] = {}
    if not classic and draw(st.booleans()):
        windows["release"] = draw(st.lists(times, min_size=n, max_size=n))
        windows["deadline"] = draw(st.lists(st.none() | times, min_size=n, max_size=n))
    return JobShop(jobs, [f"m{k}" for k in range(m)], name="drawn", **windows)


def script() -> ModuleType:
    """The kept generator script as a module."""
    spec = importlib.util.spec_from_file_location("make_jobshop", INSTANCES / "make_jobshop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# values


@given(shops())
def test_graph_describes_the_shop(shop: JobShop) -> None:
    """Row-major ids, one machine each, chains without lags, windows on first and last steps."""
    graph = shop.graph()
    assert graph is shop.graph()
    arcs = list(zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True))
    expected_arcs, i = [], 0
    for j, chain in enumerate(shop.jobs):
        for step, (machine, duration) in enumerate(chain):
            last = step == len(chain) - 1
            assert graph.op_resources[i].tolist() == [machine]
            assert (graph.job[i], graph.stage[i], graph.kind[i]) == (j, step, "")
            assert graph.duration[i] == duration
            assert graph.release[i] == (0 if step else shop.release[j])
            assert graph.deadline[i] == (shop.deadline[j] if last else NO_DEADLINE)
            expected_arcs += [] if last else [(i, i + 1)]
            i += 1
    assert arcs == expected_arcs
    assert not graph.arcs.lag.any()
    assert not graph.is_scheduled
    assert [r.name for r in graph.resources] == list(shop.machines)


@given(shops())
def test_equal_shops_have_equal_hashes(shop: JobShop) -> None:
    """Equality, hash and sha-256 agree with a copy, and survive pickling."""
    copy = JobShop(
        shop.jobs,
        shop.machines,
        release=shop.release,
        deadline=shop.deadline,
        name=shop.name,
    )
    assert copy == shop and hash(copy) == hash(shop) and copy.sha256 == shop.sha256
    again = pickle.loads(pickle.dumps(shop))
    assert again == shop and not again.duration.flags.writeable
    named = JobShop(shop.jobs, names=[f"order {j}" for j in range(shop.n_jobs)])
    assert pickle.loads(pickle.dumps(named)).names == named.names == named.job_names


@given(shops(), st.data())
def test_any_change_changes_the_hash(shop: JobShop, data: st.DataObject) -> None:
    """One duration or one window more or less is another instance."""
    i = data.draw(st.integers(0, shop.n_operations - 1))
    rows = [list(chain) for chain in shop.jobs]
    j = int(np.searchsorted(shop.first, i, side="right")) - 1
    machine, duration = rows[j][i - int(shop.first[j])]
    rows[j][i - int(shop.first[j])] = (machine, duration + 1)
    windows: dict[str, Any] = {"release": shop.release, "deadline": shop.deadline}
    assert JobShop(rows, shop.machines, **windows).sha256 != shop.sha256
    later = {**windows, "release": shop.release + (np.arange(shop.n_jobs) == j)}
    assert JobShop(shop.jobs, shop.machines, **later).sha256 != shop.sha256


def test_sha256_is_that_of_the_standard_text() -> None:
    """Without windows the hash is the one of the file itself."""
    text = standard.to_text(JobShop(TOY))
    assert text == "2 2\n0 3 1 2\n1 4 0 1\n"
    assert JobShop(TOY).sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_input_arrays_are_copied() -> None:
    """Changing the caller's array later does not change the shop."""
    durations, machines = np.array([[3, 2], [4, 1]]), np.array([[0, 1], [1, 0]])
    release = np.array([0, 5])
    shop = JobShop.from_matrices(durations, machines)
    other = JobShop(TOY, release=release)
    durations[:], release[:] = 0, 0
    assert shop == JobShop(TOY)
    assert other.release.tolist() == [0, 5]


@given(shops(classic=True))
def test_reversed_twice_is_the_shop(shop: JobShop) -> None:
    """The mirror of the mirror is the shop; chains run backwards."""
    mirror = shop.reversed()
    assert mirror.reversed() == shop
    assert mirror.jobs == tuple(chain[::-1] for chain in shop.jobs)


# as a problem


def test_evaluate() -> None:
    """The makespan of an own schedule; a foreign one is refused with both hashes."""
    shop = JobShop(TOY, name="toy")
    schedule = shop.graph().with_orders(
        Csr.of([[0, 3], [2, 1]]), [0, 4, 0, 4], Objective("makespan", 6)
    )
    assert shop.evaluate(schedule) == 6
    assert shop.evaluate(dataclasses.replace(schedule, name="renamed")) == 6
    other = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 2)]], name="toy")
    with pytest.raises(InputError) as error:
        other.evaluate(schedule)
    assert schedule.sha256[:12] in str(error.value)
    assert other.sha256[:12] in str(error.value)
    with pytest.raises(InputError, match="not scheduled"):
        shop.evaluate(shop.graph())


def test_deadline_below_the_chain() -> None:
    """The reason names job, chain length and deadline; one unit more is fine."""
    reason = JobShop(TOY, release=[0, 2], deadline=[None, 6], time_unit="s").infeasibility()
    assert reason == (
        "job 1 needs 5 s for its chain from its release at 2 s on, but its deadline is 6 s"
    )
    assert JobShop(TOY, release=[0, 2], deadline=[None, 7]).infeasibility() == ""
    assert JobShop(TOY).infeasibility() == ""


# refusals

HOSTILE: list[tuple[str, Any, Any, str]] = [
    ("no jobs", [], {}, "jobs: .*at least one job"),
    ("empty job", [[(0, 1)], []], {}, r"jobs\[1\]: .*at least one operation"),
    ("not a list", 5, {}, "jobs: expected a list of jobs, got 5"),
    ("flat", [1, 2], {}, r"jobs\[0\]: expected a list of pairs"),
    ("triple", [[(0, 1, 2)]], {}, r"jobs\[0\]\[0\]: expected a pair \(machine, duration\)"),
    ("negative", [[(0, 1)], [(0, -3)]], {}, r"jobs\[1\]\[0\]: duration: .* 0\.\.2\^53, got -3"),
    ("fraction", [[(0, 1.5)]], {}, r"jobs\[0\]\[0\]: duration: .*got 1.5"),
    ("bool", [[(0, True)]], {}, r"got True"),
    ("10^30", [[(0, 10**30)]], {}, r"2\^53, got 1000000"),
    ("1-based", [[(1, 3), (2, 3)]], {"machines": ["a", "b"]}, r"0\.\.1, got 2 \(machines are 0-b"),
    ("10^9 machines", [[(10**9, 3)]], {}, r"machine: expected an integer in 0\.\.99999, got"),
    ("sum with release", [[(0, 2**53)]], {"release": [1]}, r"add up to .*above 2\^53"),
    ("same names", TOY, {"machines": ["a", "a"]}, r"machines\[1\]: \"a\" is also the name"),
    ("release count", TOY, {"release": [1]}, r"release: expected a list \(2 values\), got 1"),
    ("release -1", TOY, {"release": [0, -1]}, r"release\[1\]: .*got -1"),
    ("unit", TOY, {"time_unit": "min"}, 'time_unit: expected one of ns, us, ms, s, got "min"'),
    ("long name", TOY, {"name": "x" * 201}, "name: longer than 200"),
    ("job names", TOY, {"names": ["a", "a"]}, r"names\[1\]: \"a\" is also the name of names\[0\]"),
    ("field", TOY, {"relase": [1, 2]}, r"relase: a JobShop has no such field \(did you mean rel"),
]


@pytest.mark.parametrize(("jobs", "rest", "message"), [row[1:] for row in HOSTILE])
def test_hostile_arguments(jobs: Any, rest: Any, message: str) -> None:
    """Every bad argument is refused with its place and value."""
    with pytest.raises(InputError, match=message):
        JobShop(jobs, **rest)


HOSTILE_MATRICES: list[tuple[Any, Any, str]] = [
    (np.array([[1.0, 2.0]]), [[0, 1]], "durations: expected integers, got float64 values"),
    ([[1, 2], [3]], [[0, 1], [1, 0]], "durations: the rows differ in length"),
    ([[1, 2]], [[0, 1], [1, 0]], r"machines: shape \(2, 2\), but durations have \(1, 2\)"),
    ([1, 2], [0, 1], r"durations: expected 2 dimensions, got shape \(2,\)"),
    ([[]], [[]], r"jobs\[0\]: a job needs at least one operation"),
    ([[1, -2]], [[0, 1]], r"jobs\[0\]\[1\]: duration: .*got -2"),
]


@pytest.mark.parametrize(("durations", "machines", "message"), HOSTILE_MATRICES)
def test_hostile_matrices(durations: Any, machines: Any, message: str) -> None:
    """Floats, ragged rows and values out of range are refused."""
    with pytest.raises(InputError, match=message):
        JobShop.from_matrices(durations, machines)


# shipped instances


def test_shipped_classics_are_the_published_ones() -> None:
    """ft06, ft10 and ft20 have the published hash."""
    texts = [
        standard.to_text(JobShop.read(INSTANCES / f"{name}.txt"))
        for name in ("ft06", "ft10", "ft20")
    ]
    assert hashlib.sha256("".join(texts).encode()).hexdigest().startswith("6c8ca8be18fe")


def test_generated_instances_are_reproducible() -> None:
    """The kept script makes exactly the files that lie beside it, and all of them read."""
    made = script().documents()
    assert {path.name for path in INSTANCES.glob("*.json")} == set(made)
    for name, content in made.items():
        assert (INSTANCES / name).read_bytes() == content, name
        shop = optsched.JobShop.read(INSTANCES / name)
        assert isinstance(shop.graph(), Schedule)
        if name.startswith("tiny"):
            assert shop.n_operations <= 12


# the shipped quota plans and choices of GPUs: made by scripts, solved to their proved optima

QUOTA, GPUS = (Path(__file__).parents[2] / "instances" / kind for kind in ("quota", "subset"))
PLANS, CHOICES = (list(csv.DictReader((at / "best-known.csv").open())) for at in (QUOTA, GPUS))


@pytest.mark.parametrize("row", PLANS, ids=lambda row: row["name"])
def test_optima_of_plans(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    plan = read_problem(QUOTA / f"{row['name']}.quota.json")
    assert isinstance(plan, optsched.QuotaPlan)
    result = optsched.solve(plan, time_limit=600)
    assert (result.status, result.objective) == ("optimal", int(row["value"]))
    assert plan.objective_name == row["objective"]


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: row["name"])
def test_optima_of_choices(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    problem = optsched.GpuPlacement.read(GPUS / f"{row['name']}.subset.json")
    result = optsched.solve(problem)
    assert (result.status, result.objective) == ("optimal", int(row["value"]))


def test_files_are_what_the_scripts_make() -> None:
    """Same seed, same bytes."""
    plans = runpy.run_path(str(QUOTA / "make.py"))["plans"]()
    assert {plan.name for plan in plans} == {row["name"] for row in PLANS}
    for plan in plans:
        assert (QUOTA / f"{plan.name}.quota.json").read_bytes() == quota_json.to_json(plan)
    made = runpy.run_path(str(GPUS / "make.py"))["problems"]()
    assert {row["name"] for row in CHOICES} == {p.name for ps in made.values() for p in ps}
    for name, choices in made.items():
        model = GPUS / f"{name}.model.json"
        assert model.read_bytes() == model_document.to_json(choices[0].model)
        for problem in choices:
            path = GPUS / f"{problem.name}.subset.json"
            assert path.read_bytes() == gpus_json.to_json(problem, model)
