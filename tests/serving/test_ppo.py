"""Learned routers: the policy in the simulator, its file, PPO's parts against slow twins."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from optsched.errors import InputError, MissingExtra
from optsched.serving import rules
from optsched.serving.plan import Plan
from optsched.serving.routers import Decision, Policy
from optsched.serving.rules import sizes
from optsched.serving.simulator import simulate
from optsched.serving.workload import reference

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

from optsched.serving import ppo  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.serving.scenario import Scenario

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")

FAST = [(0, 0), (1, 3), (2, 3), (2, 3), (3, 3), (3, 3)]
ROWS = [(s, *row) for s in (0, 1) for row in FAST] + [(2, 0, 0), (2, 1, 3), (2, 2, 3), (2, 3, 3)]
PLAN = Plan.of(ROWS)
_, SIZE, _ = sizes("extended", 3, 4, 4)
WEIGHTS = np.random.default_rng(0).normal(size=SIZE) * 0.3


class Replay:
    """Decisions that were made elsewhere."""

    def __init__(self, actions: list[Any]) -> None:
        self.left = list(actions)

    def route(self, view: Any) -> Decision:
        """The next of them."""
        s, w, g = map(int, self.left.pop(0))
        while not view.feasible[s, view.segment, w]:
            w -= 1
        return Decision(s, w, 1 << g)


def episode(fleet: Any, actions: Any) -> tuple[list[Any], list[float]]:
    """Step one simulator until its episode ends; the decisions and rewards."""
    made, rewards = [], []
    for action in actions:
        _, reward, _, _ = fleet.step(np.array([action]))
        made.append(action)
        rewards.append(float(reward[0]))
        if not fleet.worlds[0].trace["decisions"].any():  # a new one
            break
    return made, rewards


def short(requests: int = 80, rate: float = 2500.0, **fields: Any) -> Scenario:
    """A trace that begins at 0, so that an episode is all of it."""
    found = reference(rate=rate, burst=3, seconds=1, seed=3, **fields)
    return found.replace(arrival_ms=(found.arrival[:requests] - found.arrival[0]) / 1e6)


def fleet_of(scenario: Scenario, mode: str = "flow", n: int = 1) -> ppo.Fleet:
    """A few simulators at the beginning of the trace."""
    found = ppo.Fleet([scenario], mode, PLAN, 0, n=n)
    found.reset()
    return found


def draws(seed: int = 1) -> Any:
    """Random decisions."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, [3, 4, 6]) for _ in range(10_000))


@pytest.mark.parametrize("mode", ["flow", "paper"])
def test_exported_policy_decides_as_torch_does(mode: str) -> None:
    """A whole trace of most likely decisions, features included."""
    scenario = short()
    fleet = fleet_of(scenario, mode)
    model = ppo.make_model(fleet, 0)
    with torch.no_grad():
        for one in model.policy.parameters():
            one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())))
    decisions = iter(lambda: tuple(model.policy.predict(fleet.seen, deterministic=True)[0][0]), ())
    made, _ = episode(fleet, decisions)
    assert len(set(made)) > 5
    run = simulate(scenario, dataclasses.replace(fleet.policy(), sampled=False), plan=PLAN)
    again = simulate(scenario, Replay(made), plan=PLAN)
    assert (run.log.batches == again.log.batches).all()  # type: ignore[union-attr]


def test_sampled_policy_mixes_servers() -> None:
    """A certain choice of server 0 leaves epsilon / N to the others; widths as the softmax says."""
    weights = np.zeros(SIZE)
    weights[-13], weights[-8:-6] = 50.0, np.log([3.0, 9.0])
    policy = Policy(weights, 3, 4, 4, epsilon=0.3, sampled=True)
    rows = simulate(short(800, rate=300), policy).log.batches  # type: ignore[union-attr]
    for key, shares in (("server", [0.8, 0.1, 0.1]), ("width", np.array([1, 1, 3, 9]) / 14)):
        for value, share in enumerate(shares):
            error = np.sqrt(share * (1 - share) / len(rows))
            assert abs((rows[key] == value).mean() - share) < 4 * error, (key, value)


def test_policy_is_saved_and_refuses_other_problems(tmp_path: Path) -> None:
    """All fields come back; another number of servers is named."""
    policy = Policy(WEIGHTS, 3, 4, 4, "extended", 0.25, sampled=True)
    policy.save(tmp_path / "router.npz")
    found = Policy.load(tmp_path / "router.npz")
    assert (found.weights == policy.weights).all()
    assert (found.state, found.epsilon, found.sampled) == ("extended", 0.25, True)
    scenario = short()
    with pytest.raises(InputError, match="trained for 3 servers, the scenario has 2"):
        simulate(scenario.replace(servers=scenario.servers[:2]), policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": np.array(4)}, "weights: expected"),
        ({"weights": np.full(SIZE, np.nan)}, "weights: expected"),
        ({"weights": np.array([None])}, "is not a file of arrays"),
        ({"sampled": np.array("no")}, "sampled: expected True or False"),
        ({"epsilon": np.array(np.nan)}, "epsilon: expected a number"),
        ({"format": np.array("optsched.policy/2")}, "format: expected"),
        ({"extra": np.array(1)}, "extra: unknown"),
        ({"sampled": None}, "sampled: missing"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Every wrong field is named, and nothing in a file is executed."""
    path = tmp_path / "router.npz"
    Policy(WEIGHTS, 3, 4, 4).save(path)
    with np.load(path) as loaded:
        fields = {**loaded, **change}
    np.savez(path, **{key: value for key, value in fields.items() if value is not None})
    with pytest.raises(InputError, match=message) as error:
        Policy.load(path)
    assert str(path) in str(error.value)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="is not a file of arrays"):
        Policy.load(path)


def test_flow_rewards_sum_to_the_objective() -> None:
    """Undiscounted, over a drained trace: an affine map of -J, energy included."""
    scenario = short(ms_per_point=2.5, ms_per_joule=40.0)
    for seed in (1, 2):
        made, rewards = episode(fleet_of(scenario), draws(seed))
        run = simulate(scenario, Replay(made), plan=PLAN, log=False)
        above = (scenario.points.max() - scenario.points.mean()) / 1e4 * scenario.ms_per_point
        wanted = 0.1 / 50 * (scenario.n_requests * above - run.cost / 1e6)
        assert sum(rewards) == pytest.approx(wanted, rel=1e-5), seed


def test_overload_ends_an_episode() -> None:
    """With more requests in the system than the limit; the last reward has the penalty."""
    fleet = fleet_of(short())
    fleet.goal["limit"] = 5
    made, rewards = episode(fleet, draws())
    assert 1 < len(made) < 40
    penalty = float(fleet.goal["latency"][0]) * 5 * ppo.HORIZON_NS
    assert min(rewards[:-1]) > -penalty > rewards[-1]


def test_settled_rewards_equal_a_replay() -> None:
    """The paper's reward of every block, from the log of the same decisions."""
    scenario = short(60, rate=1200)
    scenario = scenario.replace(mmac=np.repeat(scenario.mmac[:, :1], 4, axis=1))  # of any input
    fleet = fleet_of(scenario, "paper")
    fleet.settled = np.zeros((1, 1000))
    made, _ = episode(fleet, draws())
    log: Any = simulate(scenario, Replay(made), plan=PLAN).log
    rows = log.batches
    servers = [scenario.servers[s] for s in rows["server"]]
    x = rows["images"] * scenario.mmac[rows["segment"], 0, rows["width"]]
    x = x / [one.sat_mmac for one in servers]
    load = x / (1 + x) + 0.02
    blocks: dict[int, tuple[Any, list[int]]] = {}  # by queue time: the router is serial
    for row in rows:
        for entry in log.entries[row["first"] : row["first"] + row["images"]]:
            blocks.setdefault(int(entry["queued"]), (row, []))[1].append(int(entry["request"]))
    path: dict[int, list[int]] = {r: [] for r in range(scenario.n_requests)}
    alpha, beta, gamma, delta = ppo.PRESETS["paper"]
    wanted = []
    for _, (row, members) in sorted(blocks.items(), key=lambda one: one[0]):
        accuracy = []
        for r in members:
            path[r].append(int(row["width"]))
            whole = path[r] + path[r][-1:] * (4 - len(path[r]))
            accuracy.append(scenario.points[np.ravel_multi_index(whole, (4,) * 4)])
        running = (rows["start"] < row["end"]) & (rows["end"] >= row["end"])
        u = np.array([load[running & (rows["server"] == s)].sum() for s in range(3)])
        late = row["end"] - scenario.arrival[members].min()
        power = [
            (one.idle_w + (one.peak_w - one.idle_w) * min(v, 1))
            * (1 + 0.5 * min(1, max(0, v - 0.92) / 0.16))
            for one, v in zip(scenario.servers, u, strict=True)
        ]
        reward = alpha * (np.mean(accuracy) - scenario.points.mean()) / 1e4 / 6.13
        reward -= beta * min(late, 5e8) / 5e6 + gamma * min(np.mean(power) * late * 1e-9, 100)
        wanted.append(reward - delta * np.minimum(u, 1).var())
    assert len(wanted) == len(made)
    assert fleet.settled[0, : len(made)] == pytest.approx(np.array(wanted), rel=1e-6)


def test_open_blocks_are_settled() -> None:
    """At the end of a rollout the policy goes on until all blocks have their rewards."""
    fleet = fleet_of(short(1200, rate=1200), "paper", n=8)
    ppo.make_model(fleet, 0)
    rng = np.random.default_rng(1)
    for number in range(ppo.STEPS):
        fleet.step(rng.integers(0, [3, 4, 6], (8, 3)))
        assert fleet.episode["open"].any() == (number < ppo.STEPS - 1)
    assert (fleet.settled != 0).all()
    assert all(one.trace["decision"] == 1 for one in fleet.worlds)
    assert all(one.rule["server"] == rules.EXTERNAL for one in fleet.worlds)
    fleet.step(rng.integers(0, [3, 4, 6], (8, 3)))


def test_done_is_one_minus_the_discount() -> None:
    """By the time that passed; 1 at an episode's end; in paper mode always."""
    fleet = fleet_of(short())
    before = fleet.worlds[0].trace["now"].copy()
    _, _, end, _ = fleet.step(np.zeros((1, 3)))
    passed = fleet.worlds[0].trace["now"] - before
    assert end == pytest.approx(1 - np.exp(-passed / 50e6), rel=1e-5)
    fleet.goal["limit"] = 1
    assert max(fleet.step(np.zeros((1, 3)))[2][0] for _ in range(20)) == 1
    assert fleet_of(short(), "paper").step(np.zeros((1, 3)))[2] == 1


def test_mixed_head() -> None:
    """Probabilities and entropy of the server are those of the mixture, by NumPy."""
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.3, 0.1]])
    mixed = ppo.Mixed([3, 2]).proba_distribution(logits)
    p = np.exp([2.0, 0.0, -1.0])
    p = 0.95 * p / p.sum() + 0.05 / 3
    q = np.exp([0.3, 0.1]) / np.exp([0.3, 0.1]).sum()
    found = mixed.log_prob(torch.tensor([[1, 0]]))
    assert found.item() == pytest.approx(np.log(p[1]) + np.log(q[0]), rel=1e-5)
    entropy = -(p * np.log(p)).sum() - (q * np.log(q)).sum()
    assert mixed.entropy().item() == pytest.approx(entropy, rel=1e-5)


def test_training_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective falls; the same for the same seed; an interruption keeps the best so far."""
    monkeypatch.setattr(ppo, "ENVIRONMENTS", 16)
    scenario = reference(rate=1200, seconds=2, seed=4)
    rows: list[Any] = []

    def progress(row: Any) -> None:
        rows.append(row)
        if len(rows) in (2, 5):
            raise KeyboardInterrupt

    named: dict[str, Any] = {"plan": PLAN, "progress": progress}
    policy, curve = ppo.train_router(scenario, seed=5, **named)
    assert rows == curve
    assert rows[1]["decisions"] == 12 * 16 * 128
    assert rows[1]["cost_ms"] < 0.7 * rows[0]["cost_ms"]
    run = simulate(scenario, policy, plan=PLAN, log=False)
    assert run.cost / 1e6 / scenario.n_requests == min(row["cost_ms"] for row in rows)
    again, _ = ppo.train_router(scenario, seed=5, **named)
    assert (again.weights == policy.weights).all()


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stable-baselines3 there is one sentence."""
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.delitem(sys.modules, "optsched.serving.ppo")
    with pytest.raises(MissingExtra, match=r"\.\[ppo\]"):
        __import__("optsched.serving.ppo")
