"""Train a router by PPO (Schulman et al. 2017, stable-baselines3) on 128 simulators at a time."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numba import types

from optsched.errors import InputError, MissingExtra
from optsched.io.values import frozen, integer, one_of
from optsched.kernels.compile import INT, INTS, entry, helper, records
from optsched.serving import rules
from optsched.serving.core import DONE, NONE
from optsched.serving.routers import Policy
from optsched.serving.rules import HIDDEN, features, set_decision, sizes
from optsched.serving.scenario import Scenario
from optsched.serving.simulator import new_world, simulate
from optsched.serving.tables import NEVER, NS_PER_MS, POINTS, fields
from optsched.serving.world import ENDED, UNDECIDED, WORLD, advance, next_event, variance_of

try:
    import torch
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.distributions import MultiCategoricalDistribution
    from stable_baselines3.common.vec_env import VecEnv
    from torch.distributions import Categorical
except ImportError:
    raise MissingExtra("serving.train_router", "ppo") from None

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.serving.plan import Plan
    from optsched.serving.world import World

Row: TypeAlias = dict[str, float]

PRESETS: Final = {"paper": (0.05, 1.0, 0.5, 0.2), "paper-relaxed": (0.4, 0.3, 0.05, 0.2)}
"""Weights of accuracy, latency, energy and variance: alpha, beta, gamma, delta of the paper."""

EPSILON: Final = 0.05  # share of the uniform distribution in the choice of the server
ENVIRONMENTS, STEPS = 128, 128  # decisions of each between two updates
REQUESTS, TRACES = 4096, 16  # an episode is a window of so many requests of one trace
LIMIT: Final = 400  # flow mode: more requests in the system end an episode with a penalty
HORIZON_NS: Final = 50e6
"""Discount exp(-(t_{d+1} - t_d) / 50 ms); a discount by decision would penalise small groups."""

_POINTS, _L0 = 6.13, 5e6  # units of accuracy (percent) and latency (ns) in the paper's reward
_SCALE = 0.1 * _L0 / HORIZON_NS  # returns of the flow reward are of the order of 1
_PAPER_SCALE = 0.05  # else the critic's error dominates the trunk shared with the actor


def train_router(
    scenario: Scenario | Callable[[int], Scenario],
    mode: str = "flow",
    *,
    decisions: int = 3_000_000,
    seed: int = 0,
    plan: Plan | None = None,
    progress: Callable[[Row], None] | None = None,
) -> tuple[Policy, list[Row]]:
    """Learn server, width and group of every block.

    Parameters
    ----------
    scenario
        A scenario, or a function from 0..15 to scenarios that differ in their arrivals. Episodes
        are windows of the traces.
    mode
        ``"flow"``: the scenario's objective, by Little's law as an immediate reward (after Decima,
        Mao et al. 2019); the load increases from 20 % to 100 %. ``"paper"`` (heavy penalties),
        ``"paper-relaxed"``: the reward of Slim Scheduler after each block, without a future, and
        its smaller state (reconstructed). Unlike in the paper, the latency of a block is cut at
        500 ms and its energy at 100 J.
    decisions
        Number of decisions, rounded up to updates of 16,384.
    seed
        The same policy for the same seed; the global streams of torch and NumPy are seeded too.
    plan
        Instances that are resident from the beginning.
    progress
        Called with every row of the curve.

    Returns
    -------
    policy, curve
        The policy of the least objective on the first trace, in paper mode the last one; also after
        Ctrl-C. A row every 12 updates: ``decisions``, ``seconds``, ``load``, mean ``reward``,
        entropies of the heads ``server``, ``width`` and ``group``, and on the first trace
        ``accuracy``, ``mean_ms`` and ``cost_ms``, the objective per request.

    Examples
    --------
    >>> scenario = optsched.serving.reference(rate=2500, burst=3)
    >>> policy, curve = optsched.serving.train_router(scenario)  # doctest: +SKIP
    >>> policy.save("router.npz")  # doctest: +SKIP
    """
    one_of("mode", mode, ("flow", *PRESETS))
    decisions, seed = integer("decisions", decisions, 1), integer("seed", seed, 0, 2**31 - 1)
    one = isinstance(scenario, Scenario)
    traces: Any = [scenario] if one else [scenario(i) for i in range(TRACES)]  # type: ignore[operator]
    fleet = Fleet(traces, mode, plan, seed, n=ENVIRONMENTS)
    model: Any = make_model(fleet, seed)
    curve: list[Row] = []
    best, least, began = fleet.policy(), math.inf, time.perf_counter()

    def measure() -> None:
        """Simulate the current policy on the first trace."""
        nonlocal best, least
        router = fleet.policy()
        run = simulate(fleet.scenario, router, plan=plan, seed=1, log=False)
        row = {"decisions": float(model.num_timesteps), "seconds": time.perf_counter() - began}
        if model.num_timesteps:
            row |= {"load": fleet.load, "reward": float(model.rollout_buffer.rewards.mean())}
            heads = model.policy.get_distribution(torch.as_tensor(fleet.seen)).distribution
            for name, head in zip(("server", "width", "group"), heads, strict=True):
                row[name] = head.entropy().mean().item()
        row |= {"accuracy": run.summary.accuracy or 0.0, "mean_ms": run.summary.mean_ms or 0.0}
        row["cost_ms"] = run.cost / NS_PER_MS / fleet.scenario.n_requests
        curve.append(row)
        if fleet.paper or row["cost_ms"] <= least:
            least, best = row["cost_ms"], router
        if progress is not None:
            progress(row)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for layers of 64
    updates = math.ceil(decisions / (STEPS * ENVIRONMENTS))
    try:
        for update in range(updates):
            if update % 12 == 0:
                measure()
            if not fleet.paper:
                fleet.set_load(min(1.0, 0.2 + 2.0 * update / updates))
                model.ent_coef = 0.01 * 0.05 ** (update / updates)
            model.learn(1, log_interval=None, reset_num_timesteps=False)  # one update
    except KeyboardInterrupt:
        pass
    finally:
        torch.set_num_threads(threads)
    measure()
    return best, curve


def make_model(fleet: Fleet, seed: int) -> PPO:
    """Create the model; parameters not given are the defaults of stable-baselines3."""
    model = Model(
        "MlpPolicy", fleet, n_steps=STEPS, batch_size=4096, n_epochs=4, learning_rate=1e-3,
        gamma=1.0, gae_lambda=0.98, ent_coef=0.005, device="cpu", seed=seed,
        policy_kwargs={"net_arch": [HIDDEN] * 2},
    )  # fmt: skip
    net: Any = model.policy
    net.action_dist = Mixed(fleet.heads)
    if fleet.paper:  # one trunk
        net.mlp_extractor.value_net = net.mlp_extractor.policy_net
    fleet.net = net
    return model


class Model(PPO):
    """PPO with the delayed rewards of paper mode."""

    def train(self) -> None:
        """Learn from a rollout; A = r - V in paper mode (reconstructed)."""
        fleet: Any = self.env
        if fleet.paper:
            self.rollout_buffer.rewards[:] = _PAPER_SCALE * fleet.settled.T
            self.rollout_buffer.compute_returns_and_advantage(torch.zeros(1), np.ones(1))
        super().train()


class Mixed(MultiCategoricalDistribution):
    """Independent heads; the server's is (1 - epsilon) softmax + epsilon / N."""

    def proba_distribution(self, action_logits: torch.Tensor) -> Mixed:
        """Set the distribution from the logits of all heads."""
        parts = [x.softmax(1) for x in action_logits.split(self.action_dims, dim=1)]
        parts[0] = (1 - EPSILON) * parts[0] + EPSILON / self.action_dims[0]
        self.distribution = [Categorical(probs, validate_args=False) for probs in parts]
        return self


class Fleet(VecEnv):
    """Simulators that advance together, from one decision to the next.

    The flag `done` is 1 - gamma_d: a discount is the probability that an episode continues. In
    paper mode every decision is an episode, and its reward is known when its block is completed: at
    the end of a rollout the policy continues until all blocks are.
    """

    load = 1.0
    net: Any

    def __init__(
        self, scenarios: list[Scenario], mode: str, plan: Plan | None, seed: int, *, n: int
    ) -> None:
        first = self.scenario = scenarios[0]
        self.shape = len(first.servers), first.n_segments, first.n_widths
        self.heads = [self.shape[0], self.shape[2], rules.N_GROUPS]
        self.paper = mode != "flow"
        self.state = "paper" if self.paper else "extended"
        self.traces = [one.arrival for one in scenarios]
        self.size = min(REQUESTS, *map(len, self.traces))
        if not self.size:
            raise InputError("scenario: a trace without requests")
        self.rng = np.random.Generator(np.random.PCG64([seed, 2]))
        inputs, self.count, _ = sizes(self.state, *self.shape)
        self.arrival = np.zeros((n, self.size), np.int64)
        short = first.replace(arrival_ms=first.arrival[: self.size] / NS_PER_MS, deadline_ms=None)
        router = Policy(np.zeros(self.count), *self.shape, self.state, EPSILON, True)
        self._new = partial(new_world, short, router, plan)
        self.worlds: list[World] = [self._new()] * n
        self.goal, self.gain = _goal(first, mode)
        self.episode = np.zeros(n, EPISODE)
        self.owner = np.full((n, self.size + 1), -1, np.int64)
        self.settled, self.number = np.zeros((n, STEPS)), 0
        self.action = np.zeros((n, 3), np.int64)
        self.seen = np.zeros((n, inputs), np.float32)
        super().__init__(
            n, spaces.Box(-np.inf, np.inf, (inputs,)), spaces.MultiDiscrete(self.heads)
        )

    def policy(self) -> Policy:
        """Export the policy; in paper mode sampled, as its most likely decisions are far worse."""
        linear = (*self.net.mlp_extractor.policy_net[::2], self.net.action_net)
        parts = [part for one in linear for part in (one.weight.T, one.bias)]
        weights = np.concatenate([part.detach().numpy().ravel() for part in parts])
        return Policy(weights, *self.shape, self.state, EPSILON, self.paper)

    def set_load(self, load: float) -> None:
        """Scale the intervals between future arrivals."""
        now = np.array([world.trace["now"] for world in self.worlds])
        later = np.maximum(self.arrival - now, 0)
        self.arrival -= (later * (1 - self.load / load)).astype(np.int64)
        self.load = load

    def reset(self) -> Any:
        """Start every environment with a window of a trace."""
        for e in range(self.num_envs):
            self._restart(e)
        return self.seen.copy()

    def _restart(self, e: int) -> None:
        arrival = self.traces[self.rng.integers(len(self.traces))]
        at = self.rng.integers(len(arrival) - self.size + 1)
        self.arrival[e] = (arrival[at : at + self.size] - arrival[at]) / self.load
        world = self.worlds[e] = self._new()._replace(arrival=frozen(self.arrival[e].view()))
        world.rule["server"] = rules.EXTERNAL
        world.rule["random"] = self.rng.integers(1, rules.MODULUS)
        self.episode[e], self.owner[e] = 0, -1
        self._advance(e)

    def _advance(self, e: int, *, alone: bool = False) -> None:
        step(
            self.worlds[e], self.episode[e : e + 1], self.goal, self.owner[e], self.gain,
            self.settled[e], self.action[e], self.seen[e], -1 if alone else self.number,
        )  # fmt: skip

    def step_async(self, actions: Any) -> None:
        """Store the decisions."""
        self.action[:] = actions

    def step_wait(self) -> Any:
        """Advance to the next decisions; restart the episodes that have ended."""
        for e in range(self.num_envs):
            self._advance(e)
        self.number = (self.number + 1) % self.settled.shape[1]
        if self.paper and self.number == 0:
            weights = self.policy().weights
            for e, world in enumerate(self.worlds):
                world.weights[: self.count] = weights
                self._advance(e, alone=True)
        reward, done = self.episode["reward"].astype(np.float32), self.episode["done"] > 0
        end = np.where(done | self.paper, 1.0, 1 - np.exp(self.episode["ns"] / -HORIZON_NS))
        for e in np.flatnonzero(done).tolist():
            self._restart(e)
        return self.seen.copy(), reward, end.astype(np.float32), self.reset_infos

    def _unsupported(self, *given: Any, **named: Any) -> Any:
        """Environments have no attributes, methods or wrappers; there is nothing to close."""
        return [None] * self.num_envs

    close = get_attr = set_attr = env_method = env_is_wrapped = _unsupported


def _goal(scenario: Scenario, mode: str) -> tuple[Any, Any]:
    """Return factors of the reward, and the value of accuracy by prefix (reconstructed)."""
    goal = np.zeros(1, GOAL)
    if mode == "flow":
        price = _SCALE * NS_PER_MS / _L0  # of a ms of one request
        goal["latency"], goal["limit"] = _SCALE / _L0, LIMIT
        factor, goal["energy"] = scenario.ms_per_point * price, scenario.ms_per_joule * price
    else:
        alpha, beta, goal["energy"], goal["variance"] = PRESETS[mode]
        factor, goal["latency"] = alpha / _POINTS, beta / _L0
    k, n = scenario.n_segments, scenario.n_widths
    gain = np.zeros((k, n**k))
    for j in range(k):
        index = np.arange(n ** (j + 1))
        for _ in range(k - 1 - j):
            index = index * n + index % n
        gain[j, : n ** (j + 1)] = scenario.points[index] - scenario.points.mean()
    return goal, gain * factor / POINTS


# kernels

GOAL: Final = fields("limit", "latency energy variance")
EPISODE: Final = fields("ns open done", "reward")
"""Time since the previous decision, blocks without a reward, and the reward of flow mode."""


@entry(
    NONE, WORLD, records(EPISODE), records(GOAL), INTS, types.Array(types.float64, 2, "C"),
    types.Array(types.float64, 1, "C"), INTS, types.Array(types.float32, 1, "C"), INT,
)  # fmt: skip
def step(  # type: ignore[no-untyped-def]
    world, episode, goals, owner, gain, settled, action, seen, number
):
    """Carry out a decision and advance to the next one.

    ``owner[block]`` is the number of the decision that made a block, or -1. A negative `number`:
    the policy decides until all blocks have their rewards. Flow mode has a limit.
    """
    goal = goals[0]
    trace, record, rule = world.trace[0], episode[0], world.rule[0]
    record.reward = _spent(world, goal) if trace.decisions else 0.0  # the first pays from 0 on
    begin, status = trace.now, ENDED
    if number < 0:
        trace.decision, rule.server = -1, rules.POLICY
    elif trace.decision == 1:
        set_decision(world, action[0], action[1], action[2])
        if not goal.limit:
            owner[world.core.state[0].free_block] = number
            record.open += 1
        elif trace.segment == len(gain) - 1:
            fifo = world.fifo[trace.segment]
            images = min(trace.group, fifo.images)
            record.reward += _gain(world, fifo.head, images, trace.segment, trace.width, gain)[0]
    while status == ENDED:
        if not record.open:
            rule.server = rules.EXTERNAL
        trace.horizon = NEVER - 1
        if not goal.limit:
            trace.horizon = _settle(world, record, goal, owner, gain, settled)
        status = advance(world)
    record.reward -= _spent(world, goal)
    record.ns, record.done = trace.now - begin, status != UNDECIDED
    if goal.limit and trace.arrived - trace.completed > goal.limit:
        record.reward -= goal.latency * goal.limit * HORIZON_NS  # as if they stayed for a horizon
        record.done = 1
    if not record.done:
        at = features(world)
        for j in range(len(seen)):
            seen[j] = world.weights[at + j]


@helper(counted=False)
def _spent(world, goal):  # type: ignore[no-untyped-def]
    """Price of the integrals of requests in the system (Little's law) and of power so far."""
    found = goal.latency * world.trace[0].area
    for s in range(len(world.core.server)):
        found += goal.energy * world.core.server[s].energy
    return found


@helper(counted=False)
def _gain(world, r, images, k, w, gain):  # type: ignore[no-untyped-def]
    """Value of the accuracy of a block's requests, and their first arrival."""
    found, oldest = 0.0, NEVER
    for _ in range(images):
        request = world.request[r]
        found += gain[k, request.tuple * world.core.state[0].widths + w]
        oldest = min(oldest, world.arrival[r])
        r = request.next
    return found, oldest


@helper(counted=False)
def _settle(world, record, goal, owner, gain, settled):  # type: ignore[no-untyped-def]
    """Time of the next event; stores the paper's reward (7) of the blocks completed then."""
    trace = world.trace[0]
    core = world.core
    if trace.decision == 1:
        return trace.now
    at = min(next_event(world)[0], NEVER - 1)
    watts, variance, n = 0.0, variance_of(world), len(core.server)
    for s in range(n):
        watts += core.server[s].watts / n
    for i in range(trace.pending):
        event = world.heap[i]
        if event.at != at or event.kind != DONE:
            continue
        b = core.instance[event.server, event.which].first
        while b >= 0:
            block, number = core.block[b], owner[b]
            if number >= 0:
                k, w = block.segment, block.width
                found, oldest = _gain(world, block.first, block.images, k, w, gain)
                reward = found / block.images
                reward -= goal.energy * min(watts * (at - oldest) * 1e-9, 100.0)
                reward -= goal.latency * min(at - oldest, 500_000_000)
                settled[number] = reward - goal.variance * variance
                owner[b] = -1
                record.open -= 1
            b = block.next
    return at
