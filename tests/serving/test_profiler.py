"""Costs: what is fitted, measured, written and read, and what scenario they make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optsched.errors import InputError
from optsched.serving import profiler
from optsched.serving.profiler import Costs, fit, profile
from optsched.serving.routers import Router, Static
from optsched.serving.simulator import simulate
from optsched.serving.tables import Server

MMAC = np.array([[[1.0, 2.0], [1.0, 2.0]], [[3.0, 5.0], [4.0, 7.0]]])
CASES = [(k, i, w) for k in range(2) for i in range(2) for w in range(2) if k or not i]
ROUTER = Router(Static((1, 1)), group=1)


def costs(launch: float, cost: Any, cores: int = 1) -> Costs:
    """Fitted to what two servers would show whose batches share so many cores."""
    cases = np.array([(*case, n, m) for case in CASES for n in (1, 2, 4, 8, 16) for m in (1, 2, 3)])
    k, i, w, n, m = cases.T
    ms = (launch + n * cost[k, i, w]) * np.maximum(1.0, m / cores)
    own = [fit(Server(f"cpu-{s}", 48, 0, 0, 0, 0, 2.0 + s), cases, ms, MMAC) for s in range(2)]
    return Costs(16, [0.5, 1.0], MMAC.tolist(), [[1, 2], [3, 4]], own)


@pytest.mark.parametrize(("launch", "cores"), [(0.0, 1), (0.4, 2)])
def test_fit_recovers_costs(launch: float, cores: int) -> None:
    """Exact times give launch and costs back, also a cost of nothing, and the number of cores."""
    cost = MMAC * np.array([[[0.3]], [[0.2]]])
    cost[1, 0, 0] *= not launch
    found = costs(launch, cost, cores).servers[0]
    assert found.launch_ms == pytest.approx(launch, abs=1e-6)
    assert np.array(found.cost_ms) == pytest.approx(cost, abs=1e-6)
    assert found.parallel == cores


def test_scenario() -> None:
    """Costs make a scenario that can be simulated."""
    given = costs(0.5, MMAC * 0.1, 1)
    table = {"0,0": 70.0, "0,1": 72.0, "1,0": 71.0, "1,1": 75.0}
    scenario = given.scenario(table, rate=200, seconds=1, seed=3, router_ms=0.1)
    assert [one.id for one in scenario.servers] == ["cpu-0", "cpu-1"]
    assert scenario.launch.tolist() == pytest.approx([0.5e6] * 2, rel=1e-3)
    assert scenario.cost[1, 1, 0, 1] == pytest.approx(0.5e6, rel=1e-3)
    assert [one.load_ms for one in scenario.servers] == [2.0, 3.0]
    assert [one.vram_mb for one in scenario.servers] == [48, 48]
    assert scenario.router_ms == 0.1
    assert scenario.n_requests > 100
    assert simulate(scenario).summary.completion == 1


def network() -> Any:
    """Two segments, two widths."""
    pytest.importorskip("torch")
    from optsched.serving.network import SlimResNet

    return SlimResNet(3, (4, 8), 1, 1, 2, (0.5, 1.0))


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: every case is there, and the scenario works."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(profiler, "_TRIAL", 100)
    found = profile(network(), ["cpu"], (1, 2, 4), side=8, repeats=1,
                    on_progress=lambda *at: told.append(at))  # fmt: skip
    assert told == [(j, len(told)) for j in range(1, len(told) + 1)]
    (one,) = found.servers
    assert min(one.parallel or 0, one.load_ms or 0) > 0 and found.error is not None
    assert [np.array(part).shape for part in one.cost_ms] == [(2, 2), (2, 2)]
    assert found.vram_mb[1][1] > found.vram_mb[1][0] > 0 <= found.router_ms
    assert simulate(found.scenario(np.ones((2, 2)), rate=50), ROUTER).summary.completion == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batches": ()}, "batches: expected at least one"),
        ({"repeats": 0}, "repeats"),
         ({"devices": ["cpu", "gpu"]}, r"devices\[1\]"),
    ],
)  # fmt: skip
def test_bad_input(fields: dict[str, Any], message: str) -> None:
    """Refused before a process is started."""
    with pytest.raises(InputError, match=message):
        profile(network(), **{"side": 8, **fields})
