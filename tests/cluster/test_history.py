"""Histories: the verifier accepts every one, and a second reader finds the log in it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hand_logs import run_of, runs, stay
from hypothesis import given

from optsched.cluster.workload.job import WORK, Job
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.world.log import HALF_A, HALF_B, WHOLE
from optsched.model.verify import verify

if TYPE_CHECKING:
    from optsched.cluster.results.run import Run


@given(runs() | runs(sharing=True))
def test_every_history_verifies(run: Run) -> None:
    """Exclusive GPUs are one unary resource each, shared ones two."""
    check(run)


def check(run: Run) -> None:
    """No violation; every stay is there, on the right nodes, with its restart before its run."""
    history, log = run.history, run.log
    assert verify(history) == []
    assert history.objective is not None and history.objective.value == log.end.max()
    shared = bool((log.half != WHOLE).any())
    assert history.n_resources == run.nodes.total * (1 + shared)
    found = set()
    spans: dict[tuple[int, int], list[int]] = {}
    ends = {(int(log.job[i]), int(log.start[i])): int(log.end[i]) for i in range(len(log.job))}
    for i in range(history.n_operations):
        job, begin = int(history.job[i]), int(history.start[i])  # type: ignore[index]
        assert history.release[i] == run.workload.submit[job]
        names = [history.resources[r].name for r in history.op_resources[i]]
        if history.kind[i] == "restart":
            over = begin + int(history.duration[i])
            if ends[job, begin] > over:  # else it was cut short, and has no run
                spans[job, over] = [begin, *sorted(history.op_resources[i])]
        else:
            assert history.kind[i] == "run"
            before = spans.get((job, begin))
            if before is not None:
                assert before[1:] == sorted(history.op_resources[i]), "moved after its restart"
            start = begin if before is None else before[0]
            found.add((job, start, begin + int(history.duration[i]), counts(names, shared)))
    wanted = set()
    for i in range(len(log.job)):
        if log.start[i] + log.restart[i] < log.end[i] or log.restart[i] == 0:
            cells = range(log.node_ptr[i], log.node_ptr[i + 1])
            where = tuple(
                (f"n{log.node[k]}", int(log.count[k]) * (1 + (shared and log.half[i] == WHOLE)))
                for k in cells
            )
            wanted.add((int(log.job[i]), int(log.start[i]), int(log.end[i]), where))
    assert found == wanted
    if shared:
        check_pairs(run)


def counts(names: list[str], shared: bool) -> tuple[tuple[str, int], ...]:
    """Resources by node."""
    nodes = [name.split("g")[0] for name in names]
    assert all(("/" in name) == shared for name in names)
    return tuple((node, nodes.count(node)) for node in sorted(set(nodes)))


def check_pairs(run: Run) -> None:
    """A stay that joined another is on the same GPUs, on the other half."""
    history, log = run.history, run.log
    assert log.partner is not None
    order = np.lexsort((log.start, log.job))
    starts = {}
    for i in range(history.n_operations):
        key = int(history.job[i]), int(history.start[i])  # type: ignore[index]
        starts[key] = sorted(history.resources[r].name for r in history.op_resources[i])
    for i in order.tolist():
        p = int(log.partner[i])
        if p >= 0:
            mine = starts[int(log.job[i]), int(log.start[i])]
            its = starts[int(log.job[p]), int(log.start[p])]
            assert [name[:-1] for name in mine] == [name[:-1] for name in its]
            assert {name[-1] for name in mine} != {name[-1] for name in its}


def test_resources_of_shared_gpus() -> None:
    """As the format says: n0g1/a; an exclusive stay holds both halves."""
    jobs = [Job(name=x, sizes=(1,), work=WORK) for x in "ab"]
    jobs.append(Job(name="c", sizes=(2,), work=WORK))
    run = run_of(
        jobs,
        Nodes(1, gpus=2),
        [
            stay(0, 0, 4, {0: 1}, half=HALF_A),
            stay(1, 1, 6, {0: 1}, half=HALF_B, partner=0),
            stay(2, 6, 8, {0: 2}),
        ],
    )
    names = [r.name for r in run.history.resources]
    assert names == ["n0g0/a", "n0g0/b", "n0g1/a", "n0g1/b"]
    assert run.history.op_resources.to_lists() == [[0], [1], [0, 1, 2, 3]]
    assert run.history.provenance["jobs"] == ["a", "b", "c"]


def test_a_restart_cut_short_has_no_run() -> None:
    """Preempted while it restarts: the operation ends with the stay."""
    run = run_of(
        [Job(name="a", sizes=(1,), work=9 * WORK)],
        Nodes(1, 1),
        [
            stay(0, 0, 3, {0: 1}, work=3),
            stay(0, 5, 7, {0: 1}, restart=4),
            stay(0, 9, 12, {0: 1}, restart=1),
        ],
    )
    h = run.history
    assert h.kind.tolist() == ["run", "restart", "restart", "run"]
    assert h.duration.tolist() == [3, 2, 1, 2]
    assert verify(h) == [] and run.metrics.restart_time == 3
