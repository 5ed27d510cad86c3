"""Scenario scenarios: documents, what is refused, values known by hand, bounds."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import seeds
from serving_cases import GONE, document, mutated, plain, random_scenario, resident, routers

from optsched.errors import InputError
from optsched.serving.log import Log
from optsched.serving.routers import JSED, Router, Static
from optsched.serving.scenario import Scenario, to_json
from optsched.serving.simulator import simulate
from optsched.serving.tables import Contention, Link, Server, additive, nearest
from optsched.serving.workload import network_mmac, read_arrivals, reference

if TYPE_CHECKING:
    from pathlib import Path

PROBLEM = Scenario(
    [0.5, 1.0], [[[1.0, 2.0]], [[1.0, 2.0], [1.5, 3.0]]], [[5.0, 10.0]] * 2, [50, 60, 70, 80],
    [Server("a", 30, 1, 1, 5, 9, 4.0, 7.0, Contention(0.9, 1, 2)), Server("b", 30, 1, 1, 5, 9)],
    [0.0, 1.5], ids=["x", 7], max_batch=4, router_ms=0.1, link=Link(1, 2, [[1.0, 2.0]] * 2),
)  # fmt: skip
SCENARIO = json.loads(to_json(PROBLEM))
LOG = document(simulate(PROBLEM, Router(Static((0, 1)), JSED(), 1)).log)


# documents


@seeds(40)
def test_round_trips(seed: int, tmp_path: Path) -> None:
    """Scenario, log and schedule say the same after writing and reading."""
    scenario = random_scenario(seed)
    path = tmp_path / "s.json"
    scenario.write(path)
    again = Scenario.read(path)
    assert again.sha256 == scenario.sha256
    assert to_json(again) == path.read_bytes()
    router, plan = routers(scenario, seed)[seed % 13], resident(scenario, seed)
    run = simulate(scenario, router, plan=plan, seed=seed, horizon_ms=(None, 3.0)[seed % 2])
    assert run.log is not None
    path.write_bytes(run.log.to_json())
    log = Log.read(path, again)
    assert log.to_json() == run.log.to_json()
    assert log.schedule().same_graph(run.schedule)
    for other in (copy.deepcopy(scenario), pickle.loads(pickle.dumps(scenario))):
        assert document(simulate(other).log) == document(simulate(scenario).log)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"widths": [1.0, 0.5]}, "widths: expected ascending numbers in (0, 1]"),
    ({"mmac.1.0": [1.0]}, "mmac[1]: expected"),
    ({"vram_mb.1.1": 31.0}, "vram_mb[1][1]: an instance of segment 2 at width 1 takes 31 MB"),
    ({"vram_mb.1": [2.0, 1.0]}, "vram_mb[1]: a wider instance takes less, got [2.0, 1.0]"),
    ({"accuracy": {"0,0": 50.0}}, "accuracy: 3 of 4 tuples are missing"),
    ({"accuracy.0,2": 50.0}, "accuracy: expected 2 indices of widths such as"),
    ({"accuracy.0,1": 101.0}, 'accuracy["0,1"]: expected a percentage'),
    ({"requests.1.id": "x"}, "requests[1].id: 'x' is also the id of requests[0]"),
    ({"requests.0.weight": 1}, 'requests[0]: unknown field "weight"'),
    ({"servers": []}, "servers: expected at least one"),
    ({"servers.0.sat_mmac": GONE}, "servers[0].contention: needs sat_mmac"),
    ({"format": "optsched.routing/2"}, 'format: "optsched.routing/2" is newer than this optsched'),
]


@pytest.mark.parametrize(("edits", "says"), HOSTILE)
def test_hostile_scenarios(edits: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Each is refused with the file, the place and the value."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(mutated(SCENARIO, edits)))
    with pytest.raises(InputError) as caught:
        Scenario.read(path)
    assert str(caught.value).startswith(f"{path}: ") and says in str(caught.value)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"batches.0.instance": 2**70}, "batches[0].instance: expected an integer"),
        ({"batches.0.instance": 70}, "batches[0]: server 'b' has no instance 70"),
        ({"batches.0.requests.0.id": "7"}, "batches[0].requests[0].id: there is no '7'"),
        ({"batches.0.start_ms": "now"}, "batches[0].start_ms: "),
        ({"batches.0.size": 1}, 'batches[0]: unknown field "size"'),
        ({"summary.decisions": GONE}, "summary: "),
        ({"provenance.instance_sha256": "0" * 64}, "the log is of another scenario: 000000000000"),
        ({"format": "optsched.serving-log/2"}, "is newer than this optsched reads"),
    ],
)  # fmt: skip
def test_hostile_logs(edits: dict[str, Any], says: str) -> None:
    """Each is refused with its place and the value."""
    with pytest.raises(InputError) as caught:
        Log.read(mutated(LOG, edits), PROBLEM)
    assert says in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"arrival_ms": [math.nan]}, "arrival_ms[0]: expected 0 to 1e+12, got nan"),
        ({"ids": [1]}, "ids: 1 names of 2 requests"),
        ({"ids": [1, True]}, "requests[1].id: "),
        ({"link": (1, 2)}, "link: expected a Link"),
    ],
)
def test_arguments_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    """Each is named."""
    with pytest.raises(InputError) as caught:
        plain(**{"arrival_ms": [0.0, 1.0], **fields})
    assert says in str(caught.value), caught.value


def test_recorded_arrivals(tmp_path: Path) -> None:
    """One column; a row out of order is named by its line."""
    path = tmp_path / "a.csv"
    path.write_text("arrival_ms\n0\n1.5\n")
    assert read_arrivals(path).tolist() == [0.0, 1.5]
    for text, says in (
        ("t\n1\n", 'a.csv:1: unknown column "t"; known: arrival_ms'),
        ("arrival_ms\n2\n1\n", "a.csv:3: arrival_ms: expected a number >="),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=says):
            read_arrivals(path)


# values known by hand


def test_known_values() -> None:
    """Work and accuracies of the network as published, and of both priors."""
    work = np.array(network_mmac()[0])[0], *(np.array(part) for part in network_mmac()[1:])
    uniform = [work[0][w] + sum(part[w, w] for part in work[1:]) for w in range(4)]
    assert uniform == pytest.approx([35.1, 139.3, 312.8, 555.5], abs=0.05)
    scenario = reference(seconds=0.01)
    assert scenario.tuple_mmac[0b00_01_10_11] == pytest.approx(241, abs=0.5)
    assert scenario.tuple_mmac.mean() == pytest.approx(256, abs=0.5)
    table = additive()
    assert table.mean() == pytest.approx(73.66, abs=0.005)
    assert table[0, 1, 2, 3] == pytest.approx(75.33 + 0.27, abs=0.02)
    guess = nearest()
    assert guess.mean() == pytest.approx(72.71, abs=0.005)
    lower = [int((np.diff(guess, axis=k) < 0).sum()) for k in range(4)]
    assert sum(lower) == 90 and sum(np.diff(guess, axis=k).size for k in range(4)) == 768
    assert all((np.diff(table, axis=k) >= 0).all() for k in range(4))


def test_times_are_rounded_up() -> None:
    """To whole ns, unless only the last bit of the number is beyond one."""
    scenario = plain([0.1, 0.2 + 0.1, 1e-7, 5e8 + 1e-6], launch_ms=1e-7)
    assert scenario.arrival.tolist() == [1, 100_000, 300_000, 500_000_000_000_001]
    assert scenario.launch.tolist() == [1]
    assert scenario.ids == (2, 0, 1, 3)
