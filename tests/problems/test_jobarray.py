"""`JobArray`: its graph for every option, its document, its refusals, its value semantics."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, Schedule
from optsched.errors import InputError
from optsched.problems.jobarray import document as jobarray_json
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array

if TYPE_CHECKING:
    from random import Random

FORWARD, BACKWARD = [[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]
Key = tuple[str, int, int, int]  # kind, job, micro-batch, stage


def array(**options: Any) -> JobArray:
    """Two jobs on three stages, all times different."""
    return JobArray(FORWARD, BACKWARD, **options)


def keys(graph: Schedule) -> list[Key]:
    """Name of every operation."""
    columns = (graph.kind, graph.job, graph.microbatch, graph.stage)
    return [(str(k), int(j), int(m), int(v)) for k, j, m, v in zip(*columns, strict=True)]


def arcs(graph: Schedule) -> dict[tuple[Key, Key], int]:
    """Lag of every arc, by names; no arc twice."""
    names = keys(graph)
    rows = [(names[i], names[k], int(lag)) for i, k, lag, _ in zip(*graph.arcs, strict=True)]
    found = {(i, k): lag for i, k, lag in rows}
    assert len(found) == len(rows)
    return found


def of(graph: Schedule, column: str, kind: str) -> dict[tuple[int, int, int], int]:
    """Values of the operations of one kind, by (job, micro-batch, stage)."""
    values = getattr(graph, column).tolist()
    return {key[1:]: values[i] for i, key in enumerate(keys(graph)) if key[0] == kind}


def expected(a: JobArray) -> tuple[dict[Key, int], dict[tuple[Key, Key], int]]:
    """Durations and arcs of section 2 of the problem's definition, spelled out one by one."""
    duration: dict[Key, int] = {}
    arc: dict[tuple[Key, Key], int] = {}
    last, grad = a.n_stages - 1, "B" if a.weight is None else "I"
    for j in range(a.n_jobs):
        redo, count = a.recomputes[j], int(a.micro_batches[j])
        for m in range(count):
            for v in range(last + 1):
                f, b, r, w = ("F", j, m, v), (grad, j, m, v), ("R", j, m, v), ("W", j, m, v)
                duration[f] = int(a.forward[j, v])
                duration[b] = int(a.backward[j, v])
                if redo and a.recompute_as_block:
                    duration[r] = int(a.recompute[j, v])
                    arc[f, r] = arc[r, b] = 0
                elif redo:
                    duration[b] += int(a.recompute[j, v])
                final = b
                if a.weight is not None:
                    duration[w] = int(a.weight[j, v])
                    arc[b, w] = 0
                    final = w
                early = 0
                if a.update_mode == "fused" and m == count - 1:
                    duration[final] += int(a.update[j, v])
                    if a.weight is None and not a.update_blocks_gradient:
                        early = int(a.update[j, v])
                if v < last:
                    arc[f, ("F", j, m, v + 1)] = int(a.lag_forward[j, v])
                else:
                    arc[f, b] = 0
                if v:
                    arc[b, (grad, j, m, v - 1)] = int(a.lag_backward[j, v - 1]) - early
                if m and a.microbatch_order == "fixed":
                    for kind in ("F", grad, "W") if a.weight is not None else ("F", grad):
                        arc[(kind, j, m - 1, v), (kind, j, m, v)] = 0
                if a.update_mode in ("block", "global"):
                    u = ("U", j, 0, v)
                    duration[u] = int(a.update[j, v])
                    arc[b, u] = 0
                    if a.weight is not None:
                        arc[w, u] = 0
                    if a.update_mode == "global":
                        arc[(grad, j, m, 0), u] = 0
            if a.trailing_switch:
                duration["end", j, 0, 0] = 0
                arc[(grad, j, m, 0), ("end", j, 0, 0)] = int(a.switch[j, 0])
    return duration, arc


@given(st.randoms(use_true_random=False))
def test_operations_and_arcs_are_the_definition(rng: Random) -> None:
    """Random choices of all options: every operation, duration, arc and lag, and nothing else."""
    a = random_array(rng)
    graph = a.graph()
    names = keys(graph)
    durations, lags = expected(a)
    assert len(set(names)) == len(names)
    assert dict(zip(names, graph.duration.tolist(), strict=True)) == durations
    found = arcs(graph)
    assert found == lags
    assert (graph.arcs.tail < graph.arcs.head).all()  # ids are topological
    assert graph.job.tolist() == sorted(graph.job.tolist())  # and job-major
    for i, (kind, j, m, v) in enumerate(names):
        place = [] if kind == "end" else [int(a.devices_of(j, m)[v])]
        assert graph.op_resources[i].tolist() == place
        assert graph.family[i] == j
        switch = 0 if kind == "end" else int(a.switch[j, v])
        assert (graph.setup_out[i], graph.setup_in[i]) == (switch, 0)
        assert graph.release[i] == (a.release[j] if (kind, v) == ("F", 0) else 0)


@given(st.randoms(use_true_random=False))
def test_memory_balances_and_is_freed_by_the_last_block(rng: Random) -> None:
    """F takes, the last block that needs it frees; workspaces only where recomputation runs."""
    a = random_array(rng)
    graph = a.graph()
    for i, (kind, j, _, v) in enumerate(keys(graph)):
        redo = a.recomputes[j]
        kept = int((a.checkpoint if redo else a.activation)[j, v])
        extra = int(a.recompute_workspace[j, v]) if redo else 0
        left = int(a.weight_memory[j, v])
        inside = redo and not a.recompute_as_block
        wanted = {
            "F": (kept, 0, 0),
            "R": (extra, 0, 0),
            "B": (0, kept + (0 if inside else extra), extra if inside else 0),
            "I": (0, kept - left + (0 if inside else extra), extra if inside else 0),
            "W": (0, left, 0),
            "U": (0, 0, 0),
            "end": (0, 0, 0),
        }[kind]
        assert (graph.acquire[i], graph.free[i], graph.workspace[i]) == wanted
    for j in range(a.n_jobs):
        mine = graph.job == j
        assert graph.acquire[mine].sum() == graph.free[mine].sum()


def test_ids_are_as_documented() -> None:
    """F down, [R,] B up per micro-batch, then U and end per job."""
    graph = JobArray(
        [[1, 1]], [[1, 1]], recompute=1, recompute_mode="always", recompute_as_block=True,
        update_mode="block", micro_batches=2, trailing_switch=True,
    ).graph()  # fmt: skip
    one = ["F", "F", "R", "B", "R", "B"]
    assert graph.kind.tolist() == [*one, *one, "U", "U", "end"]
    assert graph.stage.tolist() == [0, 1, 1, 1, 0, 0] * 2 + [0, 1, 0]
    split = JobArray([[1, 1]], [[1, 1]], weight=1).graph()
    assert split.kind.tolist() == ["F", "F", "I", "W", "I", "W"]


# documents


@given(st.randoms(use_true_random=False))
def test_round_trip(rng: Random) -> None:
    """Written and read again it is equal, hash and graph included, and writes the same bytes."""
    a = random_array(rng)
    text = jobarray_json.write(a)
    again = jobarray_json.read(text.decode(), "again")
    assert again == a and hash(again) == hash(a) and again.sha256 == a.sha256
    assert jobarray_json.write(again) == text
    assert again.graph() == a.graph()
    for other in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a), a.replace()):
        assert other == a and not other.forward.flags.writeable


def test_round_trip_of_names_and_choices() -> None:
    """Names, servers, states, releases, modes and units survive."""
    a = array(
        names=["a", "b"], devices=["x", "y", "z"], servers=["s", "s", "t"], state=9, name="n",
        time_unit="ms", recompute_mode=[True, False], multiplicity=[1, 3], objective="period",
    )  # fmt: skip
    again = jobarray_json.read(jobarray_json.write(a).decode(), "again")
    for key in ("names", "devices", "servers", "name", "time_unit", "recompute_mode", "objective"):
        assert getattr(again, key) == getattr(a, key)
    assert again.state.tolist() == a.state.tolist() and again.multiplicity.tolist() == [1, 3]


# values


def test_a_value() -> None:
    """Nothing can be set, deleted or written; equality follows the content."""
    a = array()
    with pytest.raises(AttributeError, match=r"replace\(forward=...\)"):
        a.forward = 3  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="immutable"):
        del a.forward
    with pytest.raises(ValueError, match="read-only"):
        a.forward[0, 0] = 9
    assert a == array() and hash(a) == hash(array()) and a != array(switch=1) and a != 3
    assert a.graph() is a.graph()
    given = np.array(FORWARD)
    b = JobArray(given, BACKWARD)
    given[0, 0] = 99
    assert b.forward[0, 0] == 1 and given.flags.writeable


def test_subset_and_without() -> None:
    """Rows, names, modes and places go along; the rest stays."""
    a = array(
        names=["a", "b"], recompute_mode=[True, False], release=[3, 4], switch=[[1] * 3, [2] * 3],
        place=[[[0, 1, 2]], [[2, 1, 0]]],
    )  # fmt: skip
    b = a.without(0)
    assert b == a.subset([1]) and b.names == ("b",) and b.recomputes == (False,)
    assert b.release.tolist() == [4] and b.switch.tolist() == [[2, 2, 2]]
    assert b.devices_of(0).tolist() == [2, 1, 0] and b.n_devices == 3
    assert a.subset([1, 0]).names == ("b", "a") and a.subset([0, 1]) == a
    for wrong in ([2], [-1], [0.5], [True], []):
        with pytest.raises(InputError, match="jobs: expected"):
            a.subset(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="job: expected"):
        b.without(0)
    with pytest.raises(InputError, match="speed: a JobArray has no such field"):
        a.replace(speed=3)


# recomputation to be chosen


CHOICE = {"recompute": 1, "activation": 6, "checkpoint": 1, "recompute_mode": "choose"}


def test_there_is_no_graph_until_a_choice_is_made() -> None:
    """`graph` says in one sentence what to do; graph(recompute=) works."""
    a = array(**CHOICE)
    with pytest.raises(InputError, match="choose") as caught:
        a.graph()
    assert "\n" not in str(caught.value)
    assert of(a.graph([True, False]), "acquire", "F")[0, 0, 0] == 1
    assert of(a.graph([True, False]), "acquire", "F")[1, 0, 0] == 6
    assert a.graph([True, True]) == array(**{**CHOICE, "recompute_mode": "always"}).graph()


@pytest.mark.parametrize(
    ("memory", "workspace", "fits"),
    [(6, 9, True), (3, 2, True), (5, 9, False), (6, 0, True), (0, 99, True)],
)
def test_a_choice_is_infeasible_only_both_ways(memory: int, workspace: int, fits: bool) -> None:
    """6 bytes without, 1 + workspace with recomputation: one way that fits is enough."""
    a = array(**CHOICE, recompute_workspace=workspace, memory=[memory] * 3)
    assert (a.infeasibility() == "") == fits


# memory that does not fit


def test_a_job_that_does_not_fit_alone() -> None:
    """Infeasible with job, device, bytes needed and there."""
    a = array(activation=[[1, 1, 1], [1, 7, 1]], memory=[0, 6, 1], names=["small", "big"])
    reason = a.infeasibility()
    assert all(word in reason for word in ("big (job 1)", "gpu1", "7 bytes", "there are 6"))
    assert optsched.solve(a, time_limit=600).status == "infeasible"
    assert array(activation=[[1, 1, 1], [1, 6, 1]], memory=[0, 6, 1]).infeasibility() == ""


@given(st.randoms(use_true_random=False))
def test_what_fits_alone_is_feasible(rng: Random) -> None:
    """One job: infeasible by inspection exactly if no order at all fits."""
    a = random_array(rng, jobs=1, stages=2)
    if max(map(len, a.graph().users.to_lists())) <= 6:
        assert (best_makespan(a.graph()) is None) == bool(a.infeasibility())


# refusals


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"forward": [[1, 2], [3]]}, "forward: the rows differ in length"),
    ({"forward": [[1.5, 2, 3], [4, 5, 6]]}, "forward: expected integers, got float64"),
    ({"forward": [[True, 2, 3], [4, 5, 6]]}, "forward: expected integers, got true or false"),
    ({"forward": [[]]}, "forward: expected one row per job"),
    ({"forward": [[1, 2, 3], [4, 5, -4]]}, r"jobs\[1\]\.forward\[2\]: expected .* got -4"),
    ({"forward": [[2**53 + 1] * 3] * 2}, r"jobs\[0\]\.forward\[0\]: expected an integer <= 2\^53"),
    ({"forward": [[2**52] * 3] * 2}, r"add up to .* more than 2\^53"),
    ({"backward": [[1, 2, 3]]}, r"backward: expected shape \(2, 3\), got \(1, 3\)"),
    ({"lag_forward": [[1, 2, 3]] * 2}, r"lag_forward: expected shape \(2, 2\)"),
    ({"lag_forward": [[0, 0], [-5, 0]]}, r"jobs\[1\]\.lag_forward\[0\]: .*not below minus"),
    ({"micro_batches": 2**50}, "micro_batches"),
    ({"multiplicity": [1, 0]}, r"jobs\[1\]\.multiplicity: expected an integer >= 1, got 0"),
    ({"release": 1, "objective": "period"}, "release: not allowed"),
    ({"memory": [1, 2]}, "place: device 2 does not exist"),
    ({"memory": [1, 2, -3]}, r"devices\[2\]\.memory: expected an integer >= 0, got -3"),
    ({"place": [0, 1]}, r"place: expected one device per stage \(3 values\), got 2"),
    ({"place": [0, 1, 5], "devices": ["a", "b", "c"]}, "place: device 5 does not exist"),
    ({"place": [[[0, 1, 2]]]}, r"place: expected one entry per job \(2 values\), got 1"),
    ({"place": [[[0, 1, 2]], []]}, r"place\[1\]: expected one row per micro-batch"),
    ({"weight_memory": 1}, "weight_memory: needs weight blocks"),
    ({"weight": 1, "weight_memory": 3, "activation": 2}, r"weight_memory\[0\]: .*kept bytes"),
    ({"update": 1, "microbatch_order": "free"}, 'update_mode: "fused" needs'),
    ({"objective": "speed"}, "objective: expected one of makespan, total"),
    ({"trailing_switch": 1}, "trailing_switch: expected True or False, got 1"),
    ({"recompute_mode": "maybe"}, "recompute_mode: expected one of never, always, choose"),
    ({"recompute_mode": [1, 0]}, "recompute_mode: expected 2 times true or false"),
    ({"names": ["a", "a"]}, r"names\[1\]: 'a' is also the name of names\[0\]|is also the name"),
    ({"devices": ["a", "b"]}, "place: device 2 does not exist"),
    ({"servers": ["s"]}, "place: device 2 does not exist|servers: expected"),
    ({"switch": [[1, 2, 3]] * 2, "place": [0, 1, 0]}, r"jobs\[0\]\.switch\[2\]: 3, but stage 0"),
]


@pytest.mark.parametrize(("fields", "message"), HOSTILE, ids=lambda x: str(x)[:50])
def test_hostile_arguments(fields: dict[str, Any], message: str) -> None:
    """Each is refused in one sentence with place, value and legal range."""
    with pytest.raises(InputError, match=message) as caught:
        JobArray(**{"forward": FORWARD, "backward": BACKWARD, **fields})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"place": "012"}, {"place": [0.0, 1.0, 2.0]}, {"place": [[0, 1, 2], [0]]}, {"names": 3},
        {"recompute_mode": None}, {"memory": "x"}, {"weight": "x"}, {"objective": ["makespan"]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types(fields: dict[str, Any]) -> None:
    """Never a traceback from inside: an `InputError` that names the field."""
    with pytest.raises(InputError, match=next(iter(fields))):
        JobArray(FORWARD, BACKWARD, **fields)


def test_switches_agree_across_micro_batches() -> None:
    """Mirrored micro-batches put two stages on one device: one switch time there (regression)."""
    mirrored = {"place": [[[0, 1], [1, 0]]], "micro_batches": 2}
    assert JobArray([[1, 1]], [[1, 1]], switch=3, **mirrored).graph().has_setups  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"switch\[\d\]: \d, but stage \d on the same device"):
        JobArray([[1, 1]], [[1, 1]], switch=[[1, 2]], **mirrored)  # type: ignore[arg-type]
