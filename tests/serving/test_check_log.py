"""The judge of logs rejects what is wrong, one sentence each; so does the check of routers."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from depth import seeds
from serving_cases import GONE, Resident, document, mutated, plain, random_scenario, routers

from optsched.errors import InputError
from optsched.serving.log_check import check
from optsched.serving.routers import RoundRobin, Router, Static
from optsched.serving.scenario import Scenario
from optsched.serving.simulator import simulate
from optsched.serving.tables import Link, Server

if TYPE_CHECKING:
    from pathlib import Path

SERVER: dict[str, Any] = {"vram_mb": 30, "launch_ms": 1, "ms_per_mmac": 1, "idle_w": 5, "peak_w": 9}
SCENARIO = Scenario(
    [0.5, 1.0], [[[1.0, 2.0]], [[1.0, 2.0], [1.5, 3.0]]], [[5.0, 10.0]] * 2, [50, 60, 70, 80],
    [Server("a", **SERVER, load_ms=4.0), Server("b", **SERVER)],
    [0.0, 0.0, 0.0, 0.2, 0.4, 8.0, 8.0, 20.0],
    ids=["r0", "r1", "r2", 3, 4, 5, 6, 7], max_batch=2, router_ms=0.1,
    link=Link(0.5, 1.0, [[0.25, 0.5]] * 2),
)  # fmt: skip
RUN = simulate(SCENARIO, Router(Static((0, 1)), RoundRobin(), 2), plan=Resident([(0, 0, 1)]))
LOG = document(RUN.log)
EXTRA = {**LOG["instances"][3], "id": 9, "load_ms": 5.0, "ready_ms": 5.0}
FIRST, SECOND, LAST = (LOG["batches"][b] for b in (0, 2, 9))
MUTATIONS: dict[str, dict[str, Any]] = {
    # batches and their requests
    "request 7 never runs segment 1": {"batches.9": GONE},
    "request 'r1' never runs segment 0": {"batches.0.requests.1": GONE},
    "request 7 runs segment 1 2 times, in batches 9, 10": {"batches.+": LAST},
    "request 'r0' runs segment 0 2 times, in batches 0, 0": {
        "batches.0.requests.1": FIRST["requests"][0]},
    "has not 1 to 2 requests": {"batches.0.requests.+": FIRST["requests"][0]},
    "batch 0 (segment 0, width 0, 0 requests, 0.1 ms to 3.1 ms) has": {"batches.0.requests": []},
    "3.099998 ms) needs at least 3 ms on server 'a'": {"batches.0.end_ms": 3.099998},
    "0.1 ms to 0 ms) ends before it starts": {"batches.0.end_ms": 0.0},
    # times at which requests queue; without the link it would be 22.2
    "request 7 queues at 20 ms for batch 9": {"batches.9.requests.0.queued_ms": 20.0},
    "before its input is there, at 22.85 ms": {"batches.9.requests.0.queued_ms": 22.2},
    "before its input is there, at 20 ms": {"batches.8.requests.0.queued_ms": 19.0},
    "after that starts, at 22.95 ms": {"batches.9.requests.0.queued_ms": 23.0},
    "request 4, queued at 0.5 ms, overtakes request 'r0', queued at 0.1 ms, on server 'a'": {
        "batches.0.requests": SECOND["requests"], "batches.2.requests": FIRST["requests"]},
    "the router decides at 0.05 ms and at 0.1 ms; a decision takes 0.1 ms": {
        "batches.0.requests.1.queued_ms": 0.05},
    "the router decides at 20 ms; a decision takes 0.1 ms, and nothing waited at 19.9 ms": {
        "batches.8.requests.0.queued_ms": 20.0},
    # instances
    "starts while another batch runs on its instance": {"batches.2.start_ms": 3.0},
    "is wider than its instance": {"instances.3.width": 0},
    "is of another segment than its instance": {"instances.3.segment": 0},
    "starts before its instance is ready": {"instances.3.ready_ms": 4.0},
    "ends after its instance is unloaded": {"instances.3.unload_ms": 25.9},
    "is loaded from 0.5 ms on, a load takes 4 ms": {"instances.2.ready_ms": 4.4},
    "4 ms) is unloaded before it is ready": {"instances.+": {**EXTRA, "unload_ms": 4.0}},
    "server 'b' holds 35 MB of instances at 5.95 ms, it has 30 MB": {"instances.+": EXTRA},
    # horizon and summary
    "starts after the horizon, 20 ms": {"horizon_ms": 20.0},
    "is loaded after the horizon, 2 ms": {"horizon_ms": 2.0},
    "summary.completed: says 8, the log comes to 7": {"horizon_ms": 25.0},
    "summary.decisions: says 2, the log comes to 10": {"summary.decisions": 2},
    "summary.decisions: says 17, the log comes to 16": {"summary.decisions": 17},
    "summary.accuracy: says None": {"summary.accuracy": None},
} | {
    f"summary.{key}: says ": {f"summary.{key}": LOG["summary"][key] * (1 + 3e-6) + 3e-6}
    for key in LOG["summary"] if key not in ("decisions", "completed")
}  # fmt: skip


@pytest.mark.parametrize("says", MUTATIONS)
def test_every_mutation_is_rejected(says: str) -> None:
    """With a sentence of its own."""
    found = check(SCENARIO, mutated(LOG, MUTATIONS[says]))
    assert any(says in sentence for sentence in found), found


def test_the_log_itself_is_accepted(tmp_path: Path) -> None:
    """As a log, a document, parsed JSON, and a file."""
    assert RUN.log is not None
    path = tmp_path / "log.json"
    path.write_bytes(RUN.log.to_json())
    for log in (RUN.log, LOG, path, str(path)):
        assert check(SCENARIO, log) == []


def rejected(scenario: Scenario, log: Any) -> bool:
    """A time below 0 is refused when the log is read."""
    try:
        return bool(check(scenario, log))
    except InputError:
        return True


@seeds(40)
def test_mutations_of_any_log(seed: int) -> None:
    """A batch left out, told twice, too short, or a request of another queue time."""
    scenario = random_scenario(seed, arrival_ms=[0.0, 0.0, 1.0, 4.0])
    dice = random.Random(seed)
    log = document(simulate(scenario, dice.choice(routers(scenario, seed)), seed=seed).log)
    at = dice.randrange(len(log["batches"]))
    row = log["batches"][at]
    wrong = [copy.deepcopy(log) for _ in range(4)]
    del wrong[0]["batches"][at]
    wrong[1]["batches"].insert(at, copy.deepcopy(row))
    wrong[2]["batches"][at]["end_ms"] = row["start_ms"] - 1e-3
    wrong[3]["batches"][at]["requests"][0]["queued_ms"] = row["start_ms"] + 1e-3
    assert all(rejected(scenario, mutant) for mutant in wrong)
    assert check(scenario, log) == []


def test_a_limit_of_batches_at_a_time() -> None:
    """It is kept, and its violation is found; the second batch takes all that wait."""
    free, limited = (plain([0.0, 0.1, 0.2, 0.3], max_batch=8, parallel=most) for most in (None, 1))
    router, plan = Router(Static((0,)), group=1), Resident([(0, 0, 0)] * 3)
    found = simulate(limited, router, plan=plan).log
    assert check(limited, found) == []
    assert found.batches["images"].tolist() == [1, 3]
    log = replace(simulate(free, router, plan=plan).log, scenario=limited)
    assert any("is above the limit of 1 on server" in sentence for sentence in check(limited, log))


def test_the_log_of_another_scenario() -> None:
    """It is refused, by its hash, as an object and as a document."""
    other = SCENARIO.replace(ms_per_point=5.0)
    for log in (LOG, simulate(SCENARIO).log):
        with pytest.raises(InputError, match=r"the log is of another scenario: .*, this one is "):
            check(other, log)  # type: ignore[arg-type]


def test_a_wall_clock() -> None:
    """Measured times need not be those of the model; energy is measured or unknown."""
    log = copy.deepcopy(LOG)
    log["batches"][-1]["end_ms"] -= 0.5
    log["batches"][-1]["requests"][0]["queued_ms"] -= 0.4
    log["summary"] |= {"energy_j": None, "dynamic_energy_j": None}
    found = check(SCENARIO, log)
    assert any("needs at least" in sentence for sentence in found)
    assert any("energy_j" in sentence for sentence in found)
    assert any("input" in sentence for sentence in found)
    found = check(SCENARIO, {**log, "wall_clock": True})
    assert found and all("summary" in sentence for sentence in found)
    log["summary"]["energy_j"] = 3.0
    assert any("energy_j" in one for one in check(SCENARIO, {**log, "wall_clock": True}))


def test_inputs_may_be_padded() -> None:
    """To a width that costs less, if so it was measured."""
    scenario = plain([0.0], k=2, n=2, cost_ms=[[[1.0, 1.0]], [[3.0, 3.0], [2.0, 2.0]]])
    log = document(simulate(scenario, Router(Static((0, 0)), group=1)).log)
    log["batches"][1]["end_ms"] = 3.0
    assert not any("needs at least" in sentence for sentence in check(scenario, log))
    log["batches"][1]["end_ms"] = 2.999
    assert any("needs at least 2 ms" in sentence for sentence in check(scenario, log))
