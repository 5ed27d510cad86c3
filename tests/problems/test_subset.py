"""Subset choice as a problem: requests, schedules, answers, explanations, the dispatcher."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from oracles.best_gpus import Tables, policy_of, sizes_of, state_of
from random_subsets import best_subset

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    ClusterState,
    CountModel,
    Dispatcher,
    Host,
    HostType,
    IntraTable,
    MeasuredBandwidth,
    Measurement,
    MeasurementTable,
    Policy,
    synthetic,
)
from optsched.bandwidth.models.model import alone, unlimited
from optsched.errors import Infeasible, InputError


def paired(n: int = 8) -> tuple[tuple[str, ...], ...]:
    """Links of GPUs joined in pairs 0-1, 2-3, ..."""
    return tuple(
        tuple("X" if i == k else "NV4" if i // 2 == k // 2 else "SYS" for k in range(n))
        for i in range(n)
    )


class Fast(CountModel):
    """Networks by the least count, times 40 GB/s; doubtful where three hosts are used."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def network(self, patterns, which="value"):  # type: ignore[no-untyped-def]
        """Limits; see the class."""
        limit = unlimited(patterns)
        rows = ~alone(patterns)
        least = np.where(patterns > 0, patterns, 99).min(axis=1)
        limit[rows] = least[rows] * 40_000_000
        doubtful = (patterns > 0).sum(axis=1) == 3
        limit[doubtful] = limit[doubtful] * {"low": 1, "value": 4, "high": 8}[which] // 4
        return limit

    def intra_of(self, kind, which="value"):  # type: ignore[no-untyped-def]
        """The type's table."""
        table = self.cluster.types[kind].intra
        return None if table is None else table.values


def island(n: int = 8) -> IntraTable:
    """200 GB/s for pairs 0-1, 2-3, ... alone, else 60."""
    values = [60_000_000] * (1 << n)
    for i in range(0, n, 2):
        values[3 << i] = 200_000_000
    return IntraTable(n, values)


def one(cluster: Cluster) -> ClusterState:
    """A job on two GPUs."""
    return ClusterState.idle(cluster).take((0, 1), "a")


def small(hosts: int = 4) -> Cluster:
    """Hosts of eight GPUs in pairs, two a rack."""
    kind = HostType("pairs", 8, links=paired(), nics=8, intra=island())
    names = [Host(f"n{h}", "pairs", (f"r{h // 2}",)) for h in range(hosts)]
    return Cluster(tuple(names), (kind,), ("rack",))


def problem(**rest):  # type: ignore[no-untyped-def]
    """Eight GPUs of a cluster with two jobs."""
    cluster = small()
    state = ClusterState.parse(
        cluster, free="n0:0-5 n1:0-5 n2:0-3 n3:0,1", jobs={"a": "n0:6,7 n1:6,7", "b": "n2:4-7"},
        down="n3:2-7",
    )  # fmt: skip
    return optsched.GpuPlacement(state, Fast(cluster), rest.pop("gpus", 8), **rest)


def chosen(asked):  # type: ignore[no-untyped-def]
    """The choice of `counts`."""
    return asked.choice(optsched.solve(asked, "counts").schedule)


def test_solved_and_explained():
    """The answer is the oracle's, verified, and says what limits it."""
    asked = problem(gpus=3)
    result = optsched.solve(asked, "counts")
    assert result.status == "optimal" and result.objective == result.lower_bound
    choice = asked.choice(result.schedule)
    best = best_subset(
        asked.state, asked.model.of, asked.demands, 3
    )  # fmt: skip
    assert best is not None and (choice.gpus, choice.bandwidth) == (best.gpus, best.value)
    assert asked.describe(result.objective) == f"{choice.bandwidth / 1e6:.2f} GB/s"
    assert optsched.verify(result.schedule) == [] and asked.check(result.schedule) == []
    text = choice.explain()
    assert "limited by" in text and "on one host: 3, 60.00 GB/s" in text
    assert asked.value(result.schedule) == choice.bandwidth
    assert set(choice.rank_order) == set(choice.gpus)
    assert sum(int(line.split("=")[1]) for line in choice.hostfile().split("\n")[:-1]) == 3


def test_equals_the_oracle():
    """Solver, dispatcher and oracle agree, policies included."""
    done = 0
    for seed in range(150):
        rng = random.Random(seed)
        model = Tables(rng, sizes_of(rng, rng.randint(2, 9)))
        state = state_of(rng, model.cluster)
        policy = policy_of(rng, model.cluster)
        k = rng.randint(1, len(state.free))
        asked = optsched.GpuPlacement(state, model, k, policy=policy)
        result = optsched.solve(asked, "counts")
        best = best_subset(state, model.known, asked.demands, k, policy)
        dispatcher = Dispatcher(model.cluster, model, policy=policy)
        if best is None:
            assert result.status == "infeasible" and result.reason, seed
            with pytest.raises(Infeasible):
                dispatcher.choose(state, k)
            continue
        done += 1
        assert (result.status, result.objective) == ("optimal", -best.value), seed
        assert asked.choice(result.schedule).gpus == best.gpus, seed
        assert dispatcher.choose(state, k) == (best.gpus, best.value), seed
        assert asked.lower_bound() <= -best.value
    assert done > 90


def test_schedule_round_trip(tmp_path):
    """A choice survives its document, starts a search, and is refused by another instance."""
    asked = problem()
    result = optsched.solve(asked, "counts")
    result.schedule.write(tmp_path / "x.schedule.json")
    read = optsched.Schedule.read(tmp_path / "x.schedule.json")
    assert read == result.schedule and asked.evaluate(read) == result.objective
    again = optsched.solve(asked, "counts", warm_start=read)
    assert again.objective == result.objective
    other = problem(gpus=7)
    with pytest.raises(InputError, match="warm_start: the request gets 8 GPUs, not 7"):
        optsched.solve(other, "counts", warm_start=read)
    kinds = read.kind.tolist()
    assert kinds == ["running", "running", "dispatch"] and len(read.op_resources[2]) == 8


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            {"required": "rack"},
            "required: requested 14 GPUs in one rack, the rack with most free GPUs",
        ),
        ({"max_hosts": 2}, "max_hosts: requested 14 GPUs, 2 hosts have 12 free at most"),
        ({"min_hosts": 9}, "min_hosts: 9 hosts for 14 GPUs, and 4 have a free one"),
        (
            {"exclude": ("n0", "n1:0-5")},
            "exclude, apart: requested 14 GPUs, 6 are free on the hosts",
        ),
        ({"apart": ("x", "a")}, "exclude, apart: requested 14 GPUs, 6 are free on the hosts"),
        ({"apart": ("b",), "apart_level": "rack"}, "requested 14 GPUs, 12 are free on the hosts"),
        ({"max_per_host": 3}, "requested 14 GPUs, 18 are free, of which hosts may give 11"),
        ({"balance": "exact"}, "balance: no number of hosts in 1..more gives 14 GPUs"),
        ({"balance": "even", "min_hosts": 4}, "no set of 14 free GPUs obeys the policy"),
    ],
)
def test_infeasible_policies(rules, words):
    """The reason names the rule and the numbers."""
    asked = problem(gpus=14, policy=Policy(**rules))
    result = optsched.solve(asked, "counts")
    assert result.status == "infeasible" and words in result.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 0}, "gpus: expected an integer in 1"),
        ({"gpus": -1}, "gpus: expected an integer in 1"),
        ({"gpus": 2.5}, "gpus: expected an integer"),
        ({"gpus": True}, "gpus: expected an integer"),
        ({"traffic": "rush"}, "traffic: expected one of given, idle"),
        ({"policy": Policy(required="row")}, "required: level: expected one of rack, host"),
        ({"policy": Policy(exclude=("n9",))}, "exclude: there is no host 'n9'"),
        ({"policy": Policy(exclude=("n1:8",))}, "exclude: 'n1:8': expected ids in 0..7, got 8"),
        ({"policy": Policy(apart_level="row")}, "apart_level: level: expected one of rack, host"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_hostile_requests(change, words):
    """Each with the field, the value and the way out."""
    with pytest.raises(InputError) as caught:
        problem(**change)
    assert words in str(caught.value)


def test_a_full_cluster_is_no_bad_input():
    """More GPUs than are free: an error of its own."""
    with pytest.raises(Infeasible, match="gpus: requested 19, free 18 on 4 hosts"):
        problem(gpus=19)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda c: ClusterState(c, (99,)), "free: expected an integer in 0..31, got 99"),
        (lambda c: ClusterState.parse(c, "n0:0-"), "expected ids such as 0-3,6"),
        (lambda c: ClusterState.parse(c, "n[0-3", {}), "expected a list of hosts"),
        (lambda c: ClusterState.parse(c, "n[0-3]", demands={"a": 1}), "demands: there is no job"),
        (lambda c: ClusterState.idle(c).take((0,), ""), "take: expected GPUs and a name"),
        (lambda c: ClusterState.idle(c).give("x"), "there is no job 'x'"),
        (lambda c: one(c).take((0,), "b"), "GPU n0/0 is not free"),
        (lambda c: one(c).take("n1:0", "a"), "there is a job 'a' already"),
        (lambda c: one(c).take(7, "b"), "gpus: expected GPU numbers, got 7"),
        (lambda c: one(c).fail((99,)), "expected an integer in 0..31, got 99"),
        (lambda c: one(c).fail((2, 2)), "GPU n0/2 is given twice"),
        (lambda c: one(c).repair("n7"), "there is no host 'n7'"),
        (lambda c: one(c).resize("a", (1, 2)), "gpus: expected those of 'a' and more, or some"),
        (lambda c: one(c).resize("a", ()), "got none (see move)"),
        (lambda c: one(c).move("a", (1,)), "gpus: expected 2 to move 'a', got 1 (see resize)"),
        (lambda c: one(c).take("n1", "b").move("a", "n1:0,1"), "GPU n1/0 is not free"),
    ],
)
def test_hostile_states(make, words):
    """Overlaps, unknown hosts and ids, lost GPUs."""
    with pytest.raises(InputError) as caught:
        make(small())
    assert words in str(caught.value)


def test_what_a_policy_costs():
    """The explanation has the optimum without the rules."""
    ruled, free = problem(policy=Policy(max_hosts=2)), chosen(problem())
    text = chosen(ruled).explain()
    assert re.search(f"without the policy: [0-9+]*, {free.bandwidth / 1e6:.2f} GB/s", text)


def test_regret():
    """Regret is what the upper ends of intervals promise."""
    cluster = small()
    state = ClusterState.parse(cluster, "n0:0-2 n1:0-2 n2:0-2 n3:0-2", down="n[0-3]:3-7")
    choice = chosen(optsched.GpuPlacement(state, Fast(cluster), 9))
    assert choice.regret is not None and choice.regret > 0
    assert "not all of this is measured" in choice.explain()


def test_victims():
    """Victims are worse off by the same formula, the choice now being a tenant."""
    cluster = small()
    state = ClusterState.parse(cluster, "n0:0-3 n1:0-3", {"a": "n0:4-7 n1:4-7"}, "n[2-3]")
    choice = chosen(optsched.GpuPlacement(state, Fast(cluster), 8, traffic="heavy"))
    alone_value = 60_000_000
    # together 8+8 within the hosts: 60 GB/s, asked 60 + 60
    assert choice.standalone == alone_value and choice.bandwidth == alone_value // 2
    assert choice.victims == {"a": alone_value // 2}
    idle = chosen(optsched.GpuPlacement(state, Fast(cluster), 8, traffic="idle"))
    assert idle.bandwidth == alone_value and idle.victims == {}


def test_a_dispatcher_knows_its_cluster():
    """A state of another cluster is refused; an equal one is not; NumPy's numbers are numbers."""
    cluster = small()
    fast = Dispatcher(cluster, Fast(cluster))
    for other in (small(2), small(5)):
        with pytest.raises(InputError, match="state: is not of the dispatcher's cluster"):
            fast.choose(ClusterState.idle(other), 2)
    same = ClusterState.idle(small())
    assert fast.choose(same, np.int64(4)) == fast.choose(ClusterState.idle(cluster), 4)
    with pytest.raises(InputError, match="state: expected a ClusterState"):
        fast.choose(None, 2)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"seed": -1}, "seed: expected"),
        ({"policy": "even"}, "policy: expected a Policy"),
    ],
)
def test_hostile_dispatchers(rest, words):
    """Refused when it is made, not at the first request."""
    cluster = small()
    with pytest.raises(InputError) as caught:
        Dispatcher(cluster, Fast(cluster), **rest)
    assert words in str(caught.value)


def test_a_dispatcher_pickles():
    """It answers as the problem does, and may be sent to another process."""
    cluster = synthetic.cluster("nvswitch", 2)
    model = BottleneckBandwidth(cluster)
    state = ClusterState.parse(
        cluster, free="n01:0-3 n02:0-3",
        jobs={"a": "n01:4,5 n02:4,5", "b": "n01:6,7 n02:6,7"},
    )  # fmt: skip
    result = optsched.solve(optsched.GpuPlacement(state, model, 6))
    fast = Dispatcher(cluster, model)
    assert fast.choose(state, 6)[1] == -result.objective
    assert pickle.loads(pickle.dumps(fast)).choose(state, 6) == fast.choose(state, 6)


def test_unmeasured_is_unknown():
    """Nothing measured is no proof that nothing exists: a pattern to measure is named."""
    cluster = Cluster.uniform(HostType("two", 2), 3)
    table = MeasurementTable((Measurement((1, 1), 5), Measurement((2,), 9)))
    model = MeasuredBandwidth(cluster, table)
    for solver in ("counts", "branch_and_bound", "cpsat", "auto"):
        asked = optsched.GpuPlacement(ClusterState.idle(cluster), model, 4)
        result = optsched.solve(asked, solver, time_limit=600)
        assert result.status == "unknown" and "not measured, such as" in result.reason
        never = optsched.GpuPlacement(
            ClusterState.idle(cluster), model, 4, policy=Policy(max_hosts=1)
        )
        assert optsched.solve(never, solver, time_limit=600).status == "infeasible"


def test_racks_beyond_tables():
    """Four racks of 72 GPUs have too many patterns for tables: there is an answer all the same."""
    cluster = synthetic.cluster("nvl72", 4)
    asked = optsched.GpuPlacement(ClusterState.idle(cluster), BottleneckBandwidth(cluster), 72)
    result = optsched.solve(asked, time_limit=60)
    assert result.schedule is not None and not asked.check(result.schedule)


def test_trays_beyond_tables():
    """Whole trays go first on many hosts too."""
    kind = HostType("r", 72, tray=4, nics=72)
    for hosts in (1, 4):
        cluster = Cluster.uniform(kind, hosts)
        state = ClusterState.with_free(cluster, cluster.parse("n01:39-71"))
        asked = optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 4)
        chosen = asked.choice(optsched.solve(asked).schedule).gpus
        assert cluster.written(chosen) == "n01:40-43"


def test_mixed_measurements_are_told():
    """Answers repeat that a table mixes payloads."""
    cluster = Cluster.uniform(HostType("two", 2), 2)
    table = MeasurementTable((Measurement((1, 1), 5_000_000),), mixed=True)
    model = BottleneckBandwidth(cluster).fit(table)
    choice = chosen(optsched.GpuPlacement(ClusterState.idle(cluster), model, 3))
    assert "mixes measurements" in choice.explain()


def test_messages_stay_short_however_large_the_document() -> None:
    """A wrong text anywhere, and lists of what would be right: cut, never repeated in full."""
    from optsched.bandwidth.placement import document as subset_json

    cluster = synthetic.cluster("pcie", 6)
    state = synthetic.tenants(cluster, seed=1)
    asked = optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 2)
    tree = msgspec.json.decode(subset_json.to_json(asked))
    kinds = tree["model"]["cluster"]["types"]
    kinds += [{"name": f"type number {i}", "gpus": 1} for i in range(300)]
    policy = {"required": "host", "include": ["n001"], "apart_level": "host"}
    tree["policy"] = policy
    wrong = ["n001:0-7 " * 700, ["y" * 3000] * 5, {"k" * 4000: 1}]
    refused = 0
    for path in _paths(tree):
        for value in wrong:
            old, node = value, tree
            for key in path[:-1]:
                node = node[key]
            old, node[path[-1]] = node[path[-1]], value
            try:
                subset_json.from_tree(tree, "f")
            except InputError as error:
                refused += 1
                assert len(str(error)) < 400, path
            node[path[-1]] = old
    assert refused > 100


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a document, of long lists and mappings only the first and the last."""
    if not isinstance(node, (dict, list)):
        return [path]
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    ends = keys if len(keys) < 8 else [keys[0], keys[-1]]
    return [path] * bool(path) + [
        found for key in ends for found in _paths(node[key], (*path, key))
    ]
