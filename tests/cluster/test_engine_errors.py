"""What the engine refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_policies import Greedy

from optsched.cluster import (
    Decision,
    Job,
    NodeChange,
    Nodes,
    PolicyError,
    Settings,
    Stalled,
    simulate,
)  # fmt: skip
from optsched.cluster.policies.packing_table import PackingTable
from optsched.errors import InputError

UNIT = 10**6


class Script:
    """Answers by time; a missing time: everybody as it is."""

    name = "script"
    clairvoyant = True

    def __init__(self, answers: dict[int, Any], **more: Any) -> None:
        self.answers, self.more = answers, more

    def decide(self, view: Any) -> Any:  # noqa: D102
        answer = self.answers.get(view.time)
        if answer is None:
            return Decision(np.where(view.running & (view.gpus == 0), -1, view.gpus), wake_at=99)
        return answer if not isinstance(answer, list) else Decision(np.array(answer), **self.more)


def jobs(*sizes: tuple[int, ...], **more: Any) -> list[Job]:
    """Jobs a, b, ... of ten units of time on one GPU, in two passes."""
    return [
        Job(name=chr(97 + i), sizes=s, work=10 * UNIT, passes=2, **more)
        for i, s in enumerate(sizes)
    ]  # fmt: skip


AWAKE = Decision(np.array([1]), wake_at=3)
ONE, TWO, ELASTIC = (1,), (2,), (1, 2, 4)


@pytest.mark.parametrize(
    ("given", "answers", "more", "told"),
    [
        ([ELASTIC], {0: [3]}, {}, r'job "a": quota 3 is not one of its sizes \(1, 2, 4\)'),
        ([ELASTIC], {0: [-1]}, {}, "quota -1 is not one of"),
        ([(0,)], {0: [1]}, {}, "zero-slot task takes -1"),
        ([ELASTIC], {0: [2**62]}, {}, "is not one of"),
        ([TWO, TWO, ONE], {0: [2, 2, 1]}, {}, 'job "c": over-allocation: needs 1 GPUs when 0'),
        ([TWO, TWO, ONE], {0: [2, 2, 1]}, {"order": np.array([2, 0, 1])}, 'job "b": over-alloc'),
        ([ELASTIC], {0: AWAKE, 3: [2]}, {}, 'job "a": would go from 1 to 2 GPUs'),
        ([ELASTIC], {0: [2]}, {"nodes": {0: {7: 2}}}, "there is no node 7"),
        ([ELASTIC], {0: [2]}, {"nodes": {0: {-1: 2}}}, "there is no node -1"),
        ([ELASTIC], {0: [2]}, {"nodes": {0: {0: 1}}}, "its nodes give 1 GPUs .* quota is 2"),
        ([ELASTIC], {0: [2]}, {"nodes": {0: {0: 2, 1: 0}}}, "its nodes give"),
        ([ELASTIC], {0: [4]}, {"nodes": {0: {0: 4}}}, "too few free GPUs"),
        ([ELASTIC], {0: [2]}, {"nodes": {0: 3}}, "expected node -> GPUs"),
        ([ELASTIC], {0: [2]}, {"nodes": {4: {0: 2}}}, "expected a position 0..0"),
        ([ELASTIC], {0: [2]}, {"nodes": {0: {0: 1.5}}}, "expected (the|a) number of"),
        ([ELASTIC], {0: [2]}, {"nodes": [2]}, "expected a mapping"),
        ([ONE, ONE], {0: [1, 1]}, {"order": np.array([0, 2])}, "expected positions 0..1, got 2"),
        ([ONE], {0: [1]}, {"wake_at": 0}, "wake_at: expected a time after now"),
        ([ONE], {0: [1]}, {"wake_at": 1.5}, "wake_at"),
        ([ONE], {0: [1]}, {"wake_at": True}, "wake_at"),
        ([ONE], {0: [1]}, {"best_effort": 2}, "best_effort"),
        ([ONE], {0: [1, 1]}, {}, "expected 1 numbers, one per active job, got 2"),
        ([ONE], {0: [1.0]}, {}, "expected a row of integers"),
        ([ONE], {0: [True]}, {}, "expected a row of integers"),
        ([ONE], {0: 17}, {}, "expected a Decision"),
        ([ONE, TWO], {0: [1, 2]}, {"share": {1: 0}}, 'job "b": shares the GPUs'),
        ([ONE, ONE], {0: [0, 1]}, {"share": {1: 0}}, 'job "b": shares the GPUs'),
        ([ONE, ONE, ONE], {0: [1, 1, 1]}, {"share": {1: 0, 2: 0}}, 'job "c": shares the GPUs'),
        ([ONE, ONE], {0: [1, 1]}, {"share": {1: 1}}, "shares the GPUs"),
        ([ONE, ONE], {0: [1, 1]}, {"share": {1: 2}}, "expected a position"),
    ],
)  # fmt: skip
def test_policy_errors(
    given: list[tuple[int, ...]], answers: dict[int, Any], more: dict[str, Any], told: str
) -> None:
    """Every rule, with policy, time and job."""
    nodes = Nodes.of([2, 2], zero_slots=1)
    with pytest.raises(PolicyError, match=told) as caught:
        simulate(jobs(*given), Script(answers, **more), nodes)
    assert str(caught.value).startswith('policy "script" at time ')
    assert "\n" not in str(caught.value)


def test_policy_errors_name_the_line_of_the_policy() -> None:
    """The place of an exception is in the file of the policy, not where it called."""

    class Typo(Script):
        def decide(self, view: Any) -> Any:
            return Decision(view.nothing)

    with pytest.raises(PolicyError, match=r"attribute 'nothing' \(.*test_engine_errors\.py:\d+\)"):
        simulate(jobs(ONE), Typo({}), Nodes(1))

    class Leaves(Script):
        def decide(self, view: Any) -> Any:
            raise SystemExit(0)

    with pytest.raises(PolicyError, match="SystemExit"):
        simulate(jobs(ONE), Leaves({}), Nodes(1))


def test_non_preemptible() -> None:
    """Also when a resize finds no place."""
    with pytest.raises(PolicyError, match='"a": runs and is not preemptible'):
        simulate(jobs(ONE, preemptible=False), Script({0: [1], 5: [0]}), Nodes(1))
    script = Script({0: [1, 2], 5: [4, 2]}, best_effort=True)
    long = Job(name="b", sizes=TWO, work=90 * UNIT)
    with pytest.raises(PolicyError, match='at time 5: job "a": runs and is not preemptible'):
        simulate([*jobs(ELASTIC, preemptible=False), long], script, Nodes(1, 4))


def test_stalled_names_the_jobs() -> None:
    """Nothing runs, nothing will happen: at once, or after waking up in vain."""
    with pytest.raises(Stalled, match=r"none of 7 pending jobs at time 0.*: a, b, c, d, e and 2"):
        simulate(jobs(*[ONE] * 7), Script({0: Decision(np.zeros(7, np.int64))}), Nodes(1))

    class Awake(Script):
        def decide(self, view: Any) -> Any:
            return Decision(np.zeros(len(view.job), np.int64), wake_at=view.time + 1)

    with pytest.raises(Stalled, match="at time 10000, nothing runs"):
        simulate(jobs(ONE), Awake({}), Nodes(1))
    with pytest.raises(Stalled):
        simulate(jobs(ONE), Awake({}), Nodes(1), round=1)


def test_a_removed_cluster_stalls() -> None:
    """The nodes go, the job stays."""
    with pytest.raises(Stalled, match="time 3, nothing runs"):
        simulate(jobs(ONE), Greedy(), Nodes(1), changes=[NodeChange(3, 0, "remove")])


def test_time_is_bounded() -> None:
    """An end behind 2^53 is refused, with the job, also if it is due to restarts."""
    slow = [Job(name="slow", sizes=ONE, work=200 * UNIT, restart_cost=2**53 - 1)]
    answers = {0: Decision(np.array([1]), wake_at=9), 9: Decision(np.array([0]), wake_at=10)}
    with pytest.raises(InputError, match="lies behind 9007199254740992; running then: slow"):
        simulate(slow, Script(answers | {10: Decision(np.array([1]))}), Nodes(1))
    with pytest.raises(InputError, match="lies behind"):
        simulate(jobs(ONE), Script({0: Decision(np.array([0]), wake_at=2**70)}), Nodes(1))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"workload": jobs((16,))}, "needs 16 GPUs, the cluster has 8"),
        ({"workload": jobs((0,)), "nodes": Nodes(1, zero_slots=0)}, "zero_slots=0"),
        ({"workload": []}, "empty"),
        ({"workload": 5}, "jobs"),
        ({"nodes": 8}, "expected Nodes"),
        ({"policy": Greedy}, "expected a name or an object"),
        ({"policy": 5}, "expected a name or an object"),
        ({"policy": "fifi"}, "did you mean fifo"),
        ({"restart_cost": -1}, "restart_cost"),
        ({"restart_cost": 1.5}, "restart_cost"),
        ({"round": float("nan")}, "round"),
        ({"seed": "x"}, "seed"),
        ({"resize": "never"}, "resize: expected one of pass, anytime"),
        ({"checkpoint": None}, "checkpoint"),
        ({"engine": "fast"}, "engine"),
        ({"changes": 3}, "changes: expected a list"),
        ({"changes": [3]}, r"changes: expected a list of NodeChange, got \[3\]"),
        ({"changes": [NodeChange(0, 1, "add")]}, "there is no node 1"),
        ({"changes": [NodeChange(7, 0, "add")] * 2}, "node 0 is added at time 7, but it is there"),
        (
            {"changes": [NodeChange(t, 0, k) for t, k in ((9, "add"), (3, "drain"), (9, "add"))]},
            "node 0 is added at time 9",
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], told: str) -> None:
    """One sentence with field and value."""
    usual: dict[str, Any] = {"workload": jobs(ONE), "policy": Greedy(), "nodes": Nodes(1)}
    with pytest.raises(InputError, match=told) as caught:
        simulate(**(usual | arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Nodes(0), "nodes: expected an integer in 1"),
        (lambda: Nodes(1.5), "nodes"),  # type: ignore[arg-type]
        (lambda: Nodes(1, -1), "gpus"),
        (lambda: Nodes(2, 2**22), "GPUs in all"),
        (lambda: Nodes(1, zero_slots=-1), "zero_slots"),
        (lambda: Nodes.of([]), "1..1048576 nodes, got 0"),
        (lambda: Nodes.of(5), "nodes"),  # type: ignore[arg-type]
        (lambda: Nodes.of([1, True]), r"nodes\[1\]"),
        (lambda: Nodes.of([1, 1], names=["a"]), "1 names for 2 nodes"),
        (lambda: Nodes.of([1, 1], names=["a", "a"]), '"a" appears twice'),
        (lambda: NodeChange(-1, 0, "add"), "time"),
        (lambda: NodeChange(0, -1, "add"), "node"),
        (lambda: NodeChange(0, 0, "lose"), "add, drain, remove"),  # type: ignore[arg-type]
        (lambda: Settings(changes=NodeChange(0, 0, "add")), "changes"),  # type: ignore[arg-type]
        (lambda: PackingTable({("a", "b"): (0.5, 2.5)}), r"\(0, 2\]"),
        (lambda: PackingTable({("a", "b"): (0, 1)}), "> 0"),
        (lambda: PackingTable({("a", "b"): (1, 1), ("b", "a"): (1, 0.5)}), "given twice"),
        (lambda: PackingTable({}, share_score={"a": 3}), "0..2"),
        (lambda: PackingTable({}, memory={"a": float("nan")}), "memory"),
    ],
)
def test_parts(make: Any, told: str) -> None:
    """Nodes, changes, settings and models check themselves."""
    with pytest.raises(InputError, match=told):
        make()


def test_unmeasured_pair() -> None:
    """Two jobs share GPUs that the table does not know together."""
    script = Script({0: [1, 1]}, share={1: 0})
    script.table = PackingTable({})
    with pytest.raises(PolicyError, match="beside which its speed was not measured"):
        simulate(jobs(ONE, ONE, template="x"), script, Nodes(1))


def test_packing_table_files(tmp_path: Any) -> None:
    """Read, with refusals that name file, row and field."""
    pairs, types = tmp_path / "pairs.csv", tmp_path / "types.csv"
    pairs.write_text("type_a,type_b,speed_a,speed_b\nx,y,0.9,0.8\nx,x,.5,.5\n")
    types.write_text("type,memory,share_score\nx,0.4,1\ny,0.2,0\n")
    table = PackingTable.read(pairs, types)
    assert table.pair("y", "x") == (0.8, 0.9) and table.pair("y", "y") is None
    assert table.memory == {"x": 0.4, "y": 0.2} and table.share_score["x"] == 1
    for text, told in (
        ("", "empty"), ("type_a,type_b\n", 'csv:1: column "speed_a" is missing; needed: type_a'),
        ("type_a,type_b,speed_a,speed_b\nx,y,3,1\n", "csv:2: speed_a"),
        ("type_a,type_b,speed_a,speed_b\nx,y,a,1\n", "csv:2: speed_a"),
        ("type_a,type_b,speed_a,speed_b\nx,y,1\n", "csv:2: expected 4 columns, got 3"),
        ("type_a,type_b,speed_a,speed_b\nx,y,1,1\nx,y,1,1\n", "csv:3: .* twice"),
    ):  # fmt: skip
        pairs.write_text(text)
        with pytest.raises(InputError, match=told):
            PackingTable.read(pairs)
    types.write_text("type,memory,share_score\nx,-1,0\n")
    with pytest.raises(InputError, match="memory"):
        pairs.write_text("type_a,type_b,speed_a,speed_b\n")
        PackingTable.read(pairs, types)
