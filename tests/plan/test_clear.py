"""The cheapest evictions and moves: against brute force, and rules of every plan."""

from __future__ import annotations

import pytest
from move_oracle import cheapest, domains, plans, random_snapshot

from optsched.bandwidth import BottleneckBandwidth, ClusterState, synthetic
from optsched.errors import Infeasible, InputError
from optsched.plan import ClusterSnapshot, PlanJob, alternatives, clear, defragment


def always(job: PlanJob, place: dict[int, int]) -> bool:
    """Every distribution is fast enough."""
    return True


def check(found, snapshot, request) -> None:  # type: ignore[no-untyped-def]
    """Levels, pods and quotas of a plan hold, and its cost is what it says."""
    after, cluster = found.after(), snapshot.cluster
    facts = {job.name: job for job, _ in snapshot.running} | {request.name: request}
    cost = sum(facts[name].evict for name in found.evict)
    cost += sum(facts[name].move for name in found.move)
    assert cost == found.cost == found.bound
    assert {job.name for job in after.jobs} == facts.keys() - set(found.evict)
    for name in (*found.move, request.name):
        job, gpus = facts[name], after.job(name).gpus
        hosts = {int(cluster.host_of[gpu]) for gpu in gpus}
        assert len(gpus) == job.gpus
        assert any(hosts <= set(one) for one in domains(cluster, job.level))
        for h in hosts:
            size = job.gpus if job.level == "host" else job.pod
            assert sum(cluster.host_of[gpu] == h for gpu in gpus) % size == 0
    used = sum(facts[job.name].gpus for job in after.jobs
               if facts[job.name].group == request.group)  # fmt: skip
    assert used <= snapshot.quotas.get(request.group, used)
    assert found.explain()


@pytest.mark.parametrize("seed", range(250))
def test_equals_brute_force(seed: int) -> None:
    """Cost or infeasibility as by trying everything."""
    snapshot, request = random_snapshot(seed)
    best = cheapest(snapshot, request, always)
    try:
        found = clear(snapshot, "gang")
    except Infeasible:
        assert best is None
    else:
        assert found is not None and found.cost == best
        check(found, snapshot, request)


@pytest.mark.parametrize("seed", range(60))
def test_least_bandwidths_equal_brute_force(seed: int) -> None:
    """Jobs with a least bandwidth have it after the changes, at the least cost."""
    snapshot, request = random_snapshot(seed, floors=True)
    model, first = BottleneckBandwidth(snapshot.cluster), snapshot.cluster.first.tolist()

    def fast(job: PlanJob, place: dict[int, int]) -> bool:
        gpus = [first[h] + i for h, n in place.items() for i in range(n)]
        return job.bandwidth is None or model.of(gpus) >= job.bandwidth * 1e6

    best = cheapest(snapshot, request, fast)
    try:
        found = clear(snapshot, "gang", model=model)
    except Infeasible:
        assert best is None
    else:
        assert found is not None and found.cost == best
        check(found, snapshot, request)
        after = found.after()
        for name in (*found.move, request.name):
            job = next(one for one in snapshot.jobs if one.name == name)
            assert model.of(after.job(name).gpus) >= (job.bandwidth or 0) * 1e6


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_alternatives_equal_brute_force(seed: int) -> None:
    """The k cheapest plans of which none contains another, by all plans that work."""
    snapshot, request = random_snapshot(seed)
    every = plans(snapshot, request, always, cheapest=False)
    least = sorted(
        cost for cost, changes in every if not any(other < changes for _, other in every)
    )
    try:
        found = alternatives(snapshot, "gang", 4)
    except Infeasible:
        assert not least
        return
    assert [one.cost for one in found] == least[:4]
    for one in found:
        check(one, snapshot, request)


def two_hosts(**second: object) -> ClusterSnapshot:
    """Two half-full hosts and a request for a whole one."""
    state = ClusterState.parse(
        synthetic.cluster("nvswitch", 2), "n01:4-7 n02:4-7", {"a": "n01:0-3", "b": "n02:0-3"}
    )
    jobs = [
        PlanJob(name="a", gpus=4, move=5, evict=50, group="x"),
        PlanJob(name="b", gpus=4, group="x", **second),  # type: ignore[arg-type]
        PlanJob(name="c", gpus=8, level="host", group="y"),
    ]
    return ClusterSnapshot(state, jobs)


def test_alternatives_by_cost() -> None:
    """Each is the cheapest that contains no earlier one."""
    plans = alternatives(two_hosts(move=3, evict=20), "c", 9)
    assert [(one.cost, one.status) for one in plans] == [(c, "optimal") for c in (3, 5, 20, 50)]
    assert [[*one.move, *one.evict] for one in plans] == [["b"], ["a"], ["b"], ["a"]]
    ends = [one.explain()[-1].partition("; ")[2] for one in plans]
    assert ends[0] == "no plan is cheaper (proved)."
    assert {*ends[1:]} == {"no plan without the changes of those before is cheaper (proved)."}


def test_free_space_needs_no_change() -> None:
    """A request that fits costs nothing, and has no alternatives."""
    snapshot = two_hosts()
    found = alternatives(snapshot, PlanJob(name="d", gpus=8), 3)
    assert len(found) == 1 and found[0].cost == 0
    assert found[0].explain()[0] == "No job needs to stop or to move."


def test_sentences() -> None:
    """A plan says what happens, where, and what is proved."""
    found = clear(two_hosts(move=3), "c")
    assert found is not None
    assert found.explain() == [
        "Move b from n02:0-3 to n01:4-7: cost 3.",
        "c gets 8 GPUs within one host: n02:0-7.",
        "Total cost 3; no plan is cheaper (proved).",
    ]


def test_refusals() -> None:
    """Unknown requests, running ones, and those that cannot fit."""
    snapshot = two_hosts()
    with pytest.raises(InputError, match="no job 'z' is waiting; waiting: c"):
        clear(snapshot, "z")
    with pytest.raises(InputError, match="'a' runs already"):
        clear(snapshot, PlanJob(name="a", gpus=1))
    with pytest.raises(Infeasible, match="make space for c"):
        clear(ClusterSnapshot(snapshot.state, [PlanJob(name="c", gpus=8, level="host")]), "c")
    with pytest.raises(Infeasible, match="make space for c; its group has the quota 4"):
        jobs = [PlanJob(name="c", gpus=8, group="g")]
        clear(ClusterSnapshot(snapshot.state, jobs, {"g": 4}), "c")
    with pytest.raises(InputError, match="k: expected"):
        alternatives(snapshot, "c", 0)


@pytest.mark.parametrize("seed", range(40))
def test_defragment_equals_brute_force(seed: int) -> None:
    """As many free hosts as the best set of moves within the budget leaves."""
    snapshot, _ = random_snapshot(1000 + seed)
    budget, state = seed % 12, snapshot.state
    found = defragment(snapshot, budget)
    assert found.cost <= budget and found.status == "optimal"
    facts = {job.name: job for job, _ in snapshot.running}
    assert found.cost == sum(facts[name].move or 0 for name in found.move)
    after, names = found.after(), [host.name for host in snapshot.cluster.hosts]
    down = snapshot.cluster.counts(state.down)
    capacity = snapshot.cluster.sizes - down
    free = {names[h] for h in range(len(names)) if 0 < capacity[h] == after.room[h]}
    assert free == set(found.free)
    # one more free host is impossible: request all GPUs of any set of hosts by brute force
    best = most_free(snapshot, budget)
    assert len(found.free) == best


def most_free(snapshot: ClusterSnapshot, budget: int) -> int:
    """The most hosts that moves within a budget empty, by trying all sets of hosts."""
    from itertools import combinations, product

    from move_oracle import fits

    cluster, state = snapshot.cluster, snapshot.state
    capacity = cluster.sizes - cluster.counts(state.down)
    usable = [h for h in range(cluster.n_hosts) if capacity[h]]
    kinds = [{cluster.type_of[cluster.host_of[g]] for g in h.gpus} for _, h in snapshot.running]
    movable = [
        one
        for one, kind in zip(snapshot.running, kinds, strict=True)
        if one[0].move is not None and len(kind) == 1
    ]
    for size in range(len(usable), 0, -1):
        for chosen in combinations(usable, size):
            for picks in product((False, True), repeat=len(movable)):
                moved = [one for one, pick in zip(movable, picks, strict=True) if pick]
                if sum(job.move or 0 for job, _ in moved) > budget:
                    continue
                free = {h: int(n) for h, n in enumerate(state.room)}
                for _, held in moved:
                    for gpu in held.gpus:
                        free[int(cluster.host_of[gpu])] += 1
                if any(free[h] < capacity[h] for h in chosen):
                    continue
                left = {h: 0 if h in chosen else n for h, n in free.items()}
                jobs = []
                for job, held in moved:
                    fixed = {key: getattr(job, key) for key in PlanJob.__struct_fields__}
                    fixed["type"] = cluster.hosts[cluster.host_of[held.gpus[0]]].type
                    jobs.append(PlanJob(**fixed))
                if fits(snapshot, left, jobs, always):
                    return size
    return 0
