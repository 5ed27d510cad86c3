"""Routers of slimmable inference side by side, on the same traces.

    python -m benchmarks.serving routers [--seeds 16] [--first-seed 0] [--out FILE.json]
    python -m benchmarks.serving front   [--seeds 16]      a price sweep against all static tuples
    python -m benchmarks.serving paper   [--seeds 16] [--policy FILE.npz ...]
    python -m benchmarks.serving speed [--policy FILE.npz] decisions per second, Python beside it
    python -m benchmarks.serving deadlines [--seeds 16]    attainment at 1.2 times the capacity
    python -m benchmarks.serving scatter [--seeds 70]      the same on random scenarios
    python -m benchmarks.serving plan                      the planner against the hand-made plan
    python -m benchmarks.serving learn [--modes flow paper] [--seeds 5] [--decisions N]
    python -m benchmarks.serving live --scenario S.json --network NET.pt [--requests 10000]
    python -m benchmarks.serving overload --scenario S.json --network NET.pt   attainment, for real

The cluster is `optsched.serving.reference`: plausible devices, not measured ones. Everything
tuned (price and group of `marginal`, targets of `backlog`) was tuned on seeds from 100 on; the
default seeds, 0 to 15, are for reporting. Energy per image is that of all traces by all images.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.machine import machine
from optsched import serving
from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.serving import MarginalCost, Plan, Router, Scenario, Settings
from optsched.serving.simulator import new_world
from optsched.serving.world import advance

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.serving import Point

LOADS = {"2500x3": (2500, 3.0), "4500x2.5": (4500, 2.5), "2500": (2500, 1.0), "4500": (4500, 1.0)}
SECONDS = 8.0
PRICES = tuple(round(2 ** (i / 6 - 2), 3) for i in range(48))  # ms per point

HAND_MADE = [
    *((s, 0, 0) for s in range(3)),
    *((s, k, 3) for s in (0, 1) for k in (1, 2, 2, 3, 3)),
    *((2, k, 3) for k in (1, 2, 3)),
]
"""(server, segment, width) of a plan made without a model."""


def routers() -> dict[str, Any]:
    """What is compared: the paper's baseline, its peers' rules, static tuples, and ours."""
    rules = serving
    found: dict[str, Any] = {
        "random": Router(rules.RandomWidth(), rules.Random(), 0),
        "round robin": Router(rules.RandomWidth(), rules.RoundRobin(), 0),
        "power of two": Router(rules.Backlog(6), rules.PowerOfTwo(), 8),
    }
    for row in ((0, 0, 2, 3), (0, 1, 2, 3), (0, 2, 3, 3), (0, 3, 3, 3)):
        found[f"static {','.join(map(str, row))}"] = Router(rules.Static(row), rules.JSED(), 8)
    for target in (5.0, 6.0, 6.5):
        found[f"backlog {target:g} ms"] = Router(rules.Backlog(target), rules.JSED(), 8)
    found["auto (marginal cost)"] = MarginalCost()
    return found


def trace_maker(load: str, **fields: Any) -> Callable[[int], Scenario]:
    """Traces of a load, by seed."""
    rate, burst = LOADS[load]
    return lambda seed: serving.reference(
        rate=rate, burst=burst, seconds=SECONDS, seed=seed, **fields
    )


def plan_for(load: str) -> Plan:
    """The plan for a load's mean rate, of a trace that is not reported."""
    return serving.plan_instances(serving.reference(rate=LOADS[load][0], seed=10_000))


def table(points: list[Point]) -> None:
    """A row a router."""
    print(f"{'':28}{'accuracy %':>16}{'mean ms':>18}{'P99 ms':>18}{'J/image':>9}{'cost ms':>9}")
    for point in points:
        mean, half = point.mean, point.interval
        cells = [f"{mean[k]:.2f} ± {half[k]:.2f}" for k in ("accuracy", "mean_ms", "p99_ms")]
        print(
            f"{point.router:28}{cells[0]:>16}{cells[1]:>18}{cells[2]:>18}"
            f"{mean['joules_per_image']:9.4f}{mean['cost_ms']:9.3f}"
            f"{'  saturated' if point.saturated else ''}"
        )


def compare(seeds: range, out: Path | None) -> None:
    """All routers, cold and with the plan, on all loads."""
    points = []
    for load in LOADS:
        for title, plan in (("cold", None), ("planned", plan_for(load))):
            name = f"{load}/s {title}"
            print(f"\n{name}")
            found = serving.compare(trace_maker(load), routers(), seeds=seeds, plan=plan, load=name)
            table(found)
            points += found
    if out is not None:
        tree = {"format": "optsched.serving-bench/1", "points": points}
        write_atomic(out, msgspec.json.encode(tree))


def hypervolume(points: list[Point], accuracy: float = 70.0, p99_ms: float = 100.0) -> float:
    """The area that the points dominate, of accuracy above and P99 below a reference point."""
    area, reached = 0.0, accuracy
    able = [(p.mean["p99_ms"], p.mean["accuracy"]) for p in points if not p.saturated]
    for latency, percent in sorted(able):
        if latency < p99_ms and percent > reached:
            area += (percent - reached) * (p99_ms - latency)
            reached = percent
    return area


def front(seeds: range) -> None:
    """A price sweep of `marginal` against all 256 static tuples: fronts and hypervolumes."""
    for load in LOADS:
        plan = plan_for(load)
        swept = []
        for price in PRICES:
            swept += serving.compare(
                trace_maker(load, ms_per_point=price), {f"{price:g} ms/point": MarginalCost()},
                seeds=seeds, plan=plan, load=load,
            )  # fmt: skip
        static = {
            ",".join(map(str, row)): Router(serving.Static(tuple(row)), serving.JSED(), 8)
            for row in serving.reference(rate=1).tuples.tolist()
        }
        tuples = serving.compare(trace_maker(load), static, seeds=seeds, plan=plan, load=load)
        cold = serving.compare(trace_maker(load), routers(), seeds=seeds, load=load)
        own = serving.front_of(swept)
        beaten = [
            any(
                p.mean["accuracy"] >= c.mean["accuracy"] and p.mean["p99_ms"] <= c.mean["p99_ms"]
                for p in own
            )
            for c in cold
            if not c.saturated
        ]
        print(
            f"{load}/s: {len(own)} points of the sweep on its front; hypervolume "
            f"{hypervolume(swept):.1f}, of the 256 static tuples "
            f"{hypervolume(tuples):.1f} ({sum(p.saturated for p in tuples)} saturated); "
            f"cold points that are not saturated, dominated: {sum(beaten)} of {len(beaten)}"
        )


def paper(seeds: range, policies: list[Path]) -> None:
    """The shape of the paper's tables: random routing without a plan, and what replaces it."""
    for rate, burst in ((2500, 3.0), (500, 1.0)):
        make = partial(serving.reference, rate=rate, burst=burst, seconds=SECONDS)
        print(f"\n{rate}/s, bursts {burst:g}")
        chosen = {"random": routers()["random"], "random, planned": routers()["random"]}
        chosen |= {"static 0,1,2,3": routers()["static 0,1,2,3"], "auto": MarginalCost()}
        if policies:
            chosen |= {path.stem: serving.Policy.load(path) for path in policies}
        plan = serving.plan_instances(serving.reference(rate=rate, seed=10_000))
        rows = []
        for name, router in chosen.items():
            runs = [
                serving.simulate(
                    make(seed=seed),
                    router,
                    plan=None if name == "random" else plan,
                    seed=seed,
                    log=False,
                ).summary
                for seed in seeds
            ]
            keys = ("accuracy", "mean_ms", "sd_ms", "gpu_variance", "throughput_per_s")
            mean = {key: statistics.mean(getattr(run, key) for run in runs) for key in keys}
            mean["J/image"] = sum(r.energy_j for r in runs) / sum(r.completed for r in runs)
            rows.append((name, mean))
        base = rows[0][1]
        for name, mean in rows:
            cells = "".join(
                f"  {key} {value:.4g} ({value / base[key] - 1:+.0%})" if base[key] else ""
                for key, value in mean.items()
            )
            print(f"{name:18}{cells}")
    print("\nrandom routing for longer and longer traces of 2500/s, bursts 3 (it is overloaded):")
    for seconds in (2, 4, 8, 16):
        runs = [
            serving.simulate(
                serving.reference(rate=2500, burst=3, seconds=seconds, seed=seed),
                routers()["random"], seed=seed, log=False,
            ).summary.mean_ms
            for seed in seeds
        ]  # fmt: skip
        print(f"  {seconds:2} s: mean latency {statistics.mean(runs):8.0f} ms")


def deadlines(seeds: range) -> None:
    """Requests answered in time in an overload: `auto` beside the best static tuple, both shed.

    Overload: 1.2 times the most that the narrowest tuple serves, over four sizes of groups.
    """
    groups, n = (8, 16, 32, 64), 24_000
    tuples = [row for row in serving.reference(rate=1).tuples.tolist() if sum(row) <= 3]
    for name in ("two fast servers and a slow one", "the same, decisions take no time", "slow one"):
        fields: dict[str, Any] = {"router_ms": None} if "no time" in name else {}

        def make(seed: int, rate: float, ms: float | None, only: bool, fields: Any) -> Scenario:
            found = serving.reference(
                rate=rate, seconds=n / rate, seed=seed, deadline_ms=ms, **fields
            )
            return found.replace(servers=found.servers[2:]) if only else found

        only = name == "slow one"
        plan = serving.plan_instances(make(10_000, 2500, None, only, fields))
        static = {
            f"{row} by {g}": Router(serving.Static(tuple(row)), serving.JSED(), g)
            for row in tuples for g in groups
        }  # fmt: skip
        flood = make(100, 200_000, None, only, fields)
        runs = [serving.simulate(flood, static[f"{tuples[0]} by {g}"], plan=plan) for g in groups]
        most = max(run.summary.throughput_per_s or 0 for run in runs)
        for ms in (8.0, 10.0, 12.0, 20.0):
            points = serving.compare(
                partial(make, rate=1.2 * most, ms=ms, only=only, fields=fields),
                {"auto": MarginalCost(), **static}, seeds=seeds, plan=plan,
            )  # fmt: skip
            best = max(points[1:], key=lambda point: point.mean["attainment"])
            cells = [
                f"{one.mean['attainment']:.2f} ± {one.interval['attainment']:.2f} in time, "
                f"{one.mean['accuracy']:.2f} %, P99 {one.mean['p99_ms']:.2f} ms"
                for one in (points[0], best)
            ]
            print(f"{name}, {1.2 * most:.0f}/s, {ms:g} ms")
            print(f"    auto {cells[0]}\n    {best.router} {cells[1]}", flush=True)


def random_overload(seed: int) -> tuple[Scenario, Plan | None, dict[str, Any], float]:
    """Random servers, segments and deadlines; a plan if there is one, static routers, the load."""
    dice = np.random.default_rng(seed)
    k = int(dice.integers(1, 5))
    n = int(dice.integers(2, 5)) if k > 1 else 4
    widths, mmac = np.linspace(1 / n, 1, n), []
    for j in range(k):
        most = dice.uniform(2, 20)
        inputs = widths if j else widths[:1]
        mmac.append([[most * (0.3 + 0.7 * a) * w for w in widths] for a in inputs])
    servers = [
        serving.Server(
            f"s{s}", float(dice.choice([2000, 8000, 40_000])), float(dice.choice([0.05, 0.3, 1.0])),
            float(dice.choice([0.002, 0.01, 0.05])), 20, 200, float(dice.choice([5.0, 50.0])),
            parallel=dice.choice([None, 1, 2, 4]),
        )
        for s in range(int(dice.integers(1, 5)))
    ]  # fmt: skip
    base = Scenario(
        list(widths), mmac, [[100 * w + 50 for w in widths]] * k,
        70 + 3 * np.indices((n,) * k).sum(axis=0) / k, servers, [0.0],
        max_batch=int(dice.choice([1, 4, 16, 64])), router_ms=dice.choice([None, 0.02, 0.1]),
    )  # fmt: skip
    try:
        plan = serving.plan_instances(base, rate=200)
    except InputError:  # a segment fits nowhere beside the others
        plan = None
    groups = sorted({min(g, base.max_batch) for g in (8, 16, 32, 64)})
    static = {
        f"{row} by {g}": Router(serving.Static(tuple(row)), serving.JSED(), g)
        for row in base.tuples.tolist() if sum(row) <= 2 for g in groups
    }  # fmt: skip
    flood = base.replace(arrival_ms=np.zeros(3000))
    narrow = [static[f"{[0] * k} by {g}"] for g in groups]
    runs = [serving.simulate(flood, one, plan=plan, log=False).summary for one in narrow]
    load = float(dice.choice([0.5, 0.9, 1.2, 1.2, 2.0]))
    rate = load * max(run.throughput_per_s or 0 for run in runs)
    alone = base.cost[:, :, 0, 0].sum(axis=1) + k * (base.launch + base.router)
    ms = float(alone.min()) / 1e6 * float(dice.choice([2, 3, 5, 15, 40]))
    n = int(min(12_000, max(3000, rate * 0.8)))
    due: Any = ms
    if dice.random() < 0.2:
        due = np.where(dice.random(n) < 0.3, np.inf, dice.choice([ms, 3 * ms], n))
    arrival = np.random.default_rng(seed + 1).exponential(1000 / rate, n).cumsum()
    return base.replace(arrival_ms=arrival, deadline_ms=due), plan, static, load


def scatter(seeds: range) -> None:
    """Attainment of `auto` less that of the best static tuple, on random scenarios, by load."""
    found: dict[float, list[float]] = {}
    for seed in seeds:
        scenario, plan, static, load = random_overload(seed)
        given = {"auto": MarginalCost(), **static}
        points = serving.compare(scenario, given, seeds=[0], plan=plan)
        auto, *others = [point.mean["attainment"] for point in points]
        found.setdefault(load, []).append(auto - max(others))
    for load, gaps in sorted(found.items()):
        row = np.array(gaps)
        print(
            f"load {load:g}: {len(row)} scenarios, mean {row.mean():+.2f} points, "
            f"{(row < -2).sum()} over 2 behind, {(row > 2).sum()} over 2 ahead"
        )


def speed(policies: list[Path]) -> None:
    """Decisions a second on one core, best of 9; and the same sources as plain Python."""
    print(machine())
    plan = Plan.of(HAND_MADE)
    names = ("static 0,2,3,3", "static 0,0,2,3", "backlog 6 ms", "auto (marginal cost)")
    chosen = {name: routers()[name] for name in names}
    chosen |= {path.stem: serving.Policy.load(path) for path in policies}

    def rate(router: Any, log: bool, times: int, plain: bool = False) -> float:
        seconds = 0.05 if plain else 8
        scenario = serving.reference(rate=2500, burst=3, seconds=seconds, seed=0)
        best = math.inf
        for _ in range(times):
            world = new_world(scenario, router, plan, Settings(), log=log)
            world = readable(world) if plain else world
            begin = time.process_time()
            (advance.py_func if plain else advance)(world)  # type: ignore[attr-defined]
            best = min(best, time.process_time() - begin)
        return int(world.trace["decisions"][0]) / best

    for name, router in chosen.items():
        for log in (False, True):
            found = rate(router, log, 9)
            print(f"{name:24} {'full log' if log else 'no log':9} {found / 1e6:6.2f} M decisions/s")
    compiled, plain = rate(chosen[names[0]], True, 9), rate(chosen[names[0]], True, 1, plain=True)
    print(f"{names[0]}, full log, as plain Python: {plain:,.0f}/s, a {compiled / plain:,.0f}th")


def readable(given: Any) -> Any:
    """The same memory, such that the source of kernels can read it."""
    if isinstance(given, tuple):
        return type(given)(*map(readable, given))
    return given.view(np.recarray) if given.dtype.names else given


def plans() -> None:
    """Seconds and status of the planner; the objective, simulated, beside the hand-made plan's."""
    for load in LOADS:
        begin = time.perf_counter()
        plan = plan_for(load)
        seconds = time.perf_counter() - begin
        costs = []
        for chosen in (plan, Plan.of(HAND_MADE)):
            runs = [
                serving.simulate(trace_maker(load)(seed), MarginalCost(), plan=chosen, log=False)
                for seed in range(16)
            ]
            costs.append(np.mean([run.cost / run.summary.completed / 1e6 for run in runs]))
        print(
            f"{load}/s: {plan.status} in {seconds:.2f} s, cost {costs[0]:.3f} ms a request, with "
            f"the hand-made plan {costs[1]:.3f}"
        )


def learn(modes: list[str], seeds: range, decisions: int) -> None:
    """PPO, trained on 16 traces of 2500/s in bursts of 3, beside `auto` on eight others."""
    print(machine())
    make = trace_maker("2500x3")
    plan = plan_for("2500x3")

    def told(name: str, router: Any) -> None:
        runs = [serving.simulate(make(i), router, plan=plan, seed=i, log=False) for i in range(8)]
        keys = ("accuracy", "mean_ms", "p99_ms")
        mean = {key: statistics.mean(getattr(run.summary, key) for run in runs) for key in keys}
        mean["cost_ms"] = statistics.mean(run.cost / run.summary.completed / 1e6 for run in runs)
        images = sum(run.summary.completed for run in runs)
        mean["J/image"] = sum(run.summary.energy_j or 0 for run in runs) / images
        print(f"{name:28}", "  ".join(f"{key} {value:.4g}" for key, value in mean.items()))

    told("auto", MarginalCost())
    for mode in modes:
        for seed in seeds:
            begin = time.perf_counter()
            policy, _ = serving.train_router(
                lambda i: make(100 + i), mode, decisions=decisions, seed=seed, plan=plan
            )
            rate = decisions / (time.perf_counter() - begin)
            print(f"{mode}, seed {seed}: {decisions:,} decisions, {rate:,.0f}/s")
            told(f"{mode} {seed}", policy)
            if mode != "flow":
                told(f"{mode} {seed}, most likely", dataclasses.replace(policy, sampled=False))
            policy.save(f"{mode}-{seed}.npz")


def live(scenario: Path, network: Path, n: int) -> None:
    """Images submitted by eight threads, beside a simulation of the same arrivals, at three loads.

    A load is the share of what the servers do at full width without batches.
    """
    import torch

    print(machine())
    base, net = Scenario.read(scenario), serving.load_network(network)
    x, threads = serving.digits("test").x, 8
    torch.set_num_threads(1)
    alone = base.cost[:, range(base.n_segments), -1, -1].sum(axis=1) + 4 * base.launch

    def serve(rate: float) -> None:
        plan = serving.plan_instances(base, rate=rate)
        sent = np.zeros(n)
        futures: list[Any] = [None] * n

        def work(thread: int) -> None:
            rng = np.random.default_rng(thread)
            at = time.perf_counter()
            for i in range(thread, n, threads):
                at += rng.exponential(threads / rate)
                time.sleep(max(0.0, at - time.perf_counter()))
                sent[i] = time.perf_counter()
                futures[i] = server.submit(x[i % len(x)])

        with serving.LiveServer(serving.Executor(net, base, plan=plan), x.shape[1:]) as server:
            workers = [threading.Thread(target=work, args=(j,)) for j in range(threads)]
            for one in workers:
                one.start()
            for one in workers:
                one.join()
        answers = [future.result() for future in futures]
        wrong = sum(
            not np.allclose(one.output, net(x[i % len(x)][None], one.widths)[0].detach(), atol=1e-4)
            for i, one in enumerate(answers)
        )
        arrivals = np.sort(sent - sent.min()) * 1e3
        simulated = serving.simulate(base.replace(arrival_ms=arrivals), plan=plan).summary
        ms = np.sort([one.ms for one in answers])
        cells = "  ".join(
            f"{key[:-3]} {getattr(simulated, key):.2f} / {value:.2f}"
            for key, value in (("mean_ms", ms.mean()), ("p50_ms", ms[n // 2]),
                               ("p99_ms", ms[-(-99 * n // 100) - 1]))
        )  # fmt: skip
        print(f"{n} images at {rate:.0f}/s, {wrong} wrong; ms simulated / measured: {cells}")

    for share in (0.3, 0.6, 0.9):
        serve(share * 1e9 * float((1 / alone).sum()))


def overload(scenario: Path, network: Path) -> None:
    """Attainment at 1.2 times the capacity, `auto` beside static tuples, real and simulated.

    Capacity: throughput of the narrowest tuple on this machine, if all requests arrive at once.
    Deadlines: 5 and 15 times the time of a request alone. Medians of 7 runs, all routers in turn.
    """
    print(machine())
    base, net = Scenario.read(scenario), serving.load_network(network)
    x = serving.digits("test").x
    static = {
        f"{row} by {g}": Router(serving.Static(row), serving.JSED(), g)
        for row in ((0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 1)) for g in (8, 32)
    }  # fmt: skip

    def serve(rate: float, n: int, ms: float | None, router: Any) -> list[Any]:
        arrival = np.zeros(n) if rate == math.inf else serving.arrivals(rate, seconds=n / rate)
        given = base.replace(arrival_ms=arrival, deadline_ms=ms)
        images = x[[r % len(x) for r in range(given.n_requests)]]
        real = serving.Executor(net, given, router, plan).run(images).summary
        return [real, serving.simulate(given, router, plan=plan).summary]

    plan = serving.plan_instances(base, rate=1000)
    most = max(
        serve(math.inf, 4000, None, static[f"(0, 0, 0, 0) by {g}"])[0].throughput_per_s
        for g in (8, 32)
    )  # fmt: skip
    alone = float(base.cost[:, range(base.n_segments), 0, 0].sum(axis=1).min()) / 1e6
    alone += base.n_segments * float(base.launch.min()) / 1e6
    for ms in (round(5 * alone), round(15 * alone)):
        print(f"{1.2 * most:.0f}/s, deadline {ms:g} ms")
        routers = {"auto": MarginalCost(), **static}
        rounds = [[serve(1.2 * most, 6000, ms, one) for one in routers.values()] for _ in range(7)]
        for name, pairs in zip(routers, zip(*rounds, strict=True), strict=True):
            cells = []
            for runs in zip(*pairs, strict=True):
                low, _, _, middle, _, _, high = sorted(one.attainment for one in runs)
                accuracy, late = (
                    float(np.median([getattr(one, key) or 0 for one in runs]))
                    for key in ("accuracy", "late")
                )
                cells.append(
                    f"{middle:6.2f} % in time ({low:.2f} to {high:.2f}), {late:g} late, "
                    f"{accuracy:.2f} %"
                )
            print(f"{name:20} measured {cells[0]}; simulated {cells[1]}", flush=True)


def main() -> int:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    studies = ("routers", "front", "paper", "deadlines", "speed", "plan", "learn",
               "live", "overload", "scatter")  # fmt: skip
    parser.add_argument("what", choices=studies)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policy", type=Path, nargs="*", default=[])
    parser.add_argument("--modes", nargs="*", default=["flow"])
    parser.add_argument("--decisions", type=int, default=3_000_000)
    parser.add_argument("--requests", type=int, default=10_000, help="of live")
    parser.add_argument("--scenario", type=Path, help="what optsched slim profile wrote")
    parser.add_argument("--network", type=Path, help="what optsched slim train wrote")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    if given.what == "routers":
        compare(seeds, given.out)
    elif given.what == "front":
        front(seeds)
    elif given.what == "paper":
        paper(seeds, given.policy)
    elif given.what == "deadlines":
        deadlines(seeds)
    elif given.what == "scatter":
        scatter(seeds)
    elif given.what == "speed":
        speed(given.policy)
    elif given.what == "learn":
        learn(given.modes, seeds, given.decisions)
    elif given.what in ("live", "overload"):
        if given.scenario is None or given.network is None:
            parser.error(f"{given.what} needs --scenario and --network")
        if given.what == "live":
            live(given.scenario, given.network, given.requests)
        else:
            overload(given.scenario, given.network)
    else:
        plans()
    return 0


if __name__ == "__main__":
    sys.exit(main())
