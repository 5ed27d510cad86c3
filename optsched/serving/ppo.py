"""Train a router by PPO (Schulman et al. 2017, stable-baselines3) on 128 simulators at a time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numba import types

from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer
from optsched.kernels.compile import INT, entry, helper
from optsched.serving import policy, rules
from optsched.serving.core import DONE, NEVER, NONE, UNIT, Core, records
from optsched.serving.fields import NS_PER_MS, POINTS, frozen
from optsched.serving.policy import GROUPS, Policy
from optsched.serving.routers import Router
from optsched.serving.scenario import Scenario
from optsched.serving.simulator import new_world, simulate
from optsched.serving.world import ENDED, UNDECIDED, WORLD, World, advance

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
    import os
    from collections.abc import Callable

    from optsched.serving.plan import Plan

Row: TypeAlias = dict[str, float]

PRESETS: Final = {"paper": (0.05, 1.0, 0.5, 0.2), "paper-relaxed": (0.4, 0.3, 0.05, 0.2)}
"""Weights of accuracy, latency, energy and variance: the paper's alpha, beta, gamma, delta."""

EPSILON: Final = 0.05  # of the server's distribution is uniform
ENVIRONMENTS, STEPS = 128, 128  # decisions of each between two updates
REQUESTS, TRACES = 4096, 16  # an episode is a window of so many of one of these
LIMIT: Final = 400  # with more requests in the system an episode of flow mode ends, punished
HORIZON_NS: Final = 50e6
"""gamma_d = exp(-(t_{d+1} - t_d) / 50 ms): by decisions, small groups would be worth less."""

_POINTS, _L0 = 6.13, 5e6  # percent and ns that count 1
_SCALE = 0.1 * _L0 / HORIZON_NS  # returns of the flow reward are of the order of 1
_PAPER_SCALE = 0.05  # or the critic's error drowns the actor in the trunk that they share


def train_router(
    scenario: Scenario | Callable[[int], Scenario],
    mode: str = "flow",
    *,
    decisions: int = 3_000_000,
    seed: int = 0,
    plan: Plan | None = None,
    progress: Callable[[Row], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> tuple[Policy, list[Row]]:
    """Learn which server, width and group each block gets.

    Parameters
    ----------
    scenario
        A scenario, or a function that makes one from 0..15; only the arrivals may differ. Episodes
        are windows of the traces.
    mode
        ``"flow"``: the scenario's own objective, by Little's law as an immediate reward (after
        Decima, Mao et al. 2019); the load grows from 20 % to 100 %. ``"paper"`` (heavy penalties),
        ``"paper-relaxed"``: the reward of Slim Scheduler after each block, without a future, from
        its smaller state (reconstructed), with a block's latency cut at 500 ms and its energy at
        100 J, which the paper does not do.
    decisions
        To learn from; rounded up to whole updates of 16,384.
    seed
        The same policy for the same seed; torch's and numpy's global streams are seeded too.
    plan
        Instances that are resident from the beginning.
    progress
        Called with every row of the curve.
    checkpoint
        Where the best policy so far is kept.

    Returns
    -------
    policy, curve
        The best policy so far, also after Ctrl-C: of the least objective on the first trace; in
        paper mode the last one. A row every 12 updates: ``decisions``, ``seconds``,
        ``load``, mean ``reward``, entropies of the heads ``server``, ``width`` and ``group``, and
        on the first trace ``accuracy``, ``mean_ms`` and ``cost_ms``, the objective per request.
    """
    if mode not in ("flow", *PRESETS):
        raise InputError(f"mode: expected flow, {', '.join(PRESETS)}, got {mode!r:.60}")
    decisions = integer("decisions", decisions, 1, 10**12)
    seed = integer("seed", seed, 0, 2**31 - 1)
    scenarios = (
        [scenario] if isinstance(scenario, Scenario) else [scenario(i) for i in range(TRACES)]
    )
    fleet = Fleet(scenarios, mode, plan, seed, n=ENVIRONMENTS)
    model: Any = make_model(fleet, seed)
    curve: list[Row] = []
    best, most, began = fleet.policy(), -math.inf, time.perf_counter()

    def measure() -> None:
        """Simulate the policy of now on the first trace."""
        nonlocal best, most
        router = fleet.policy()
        run = simulate(fleet.scenario, router, plan=plan, seed=1, log=False)
        row = {"decisions": float(model.num_timesteps), "seconds": time.perf_counter() - began}
        if model.num_timesteps:
            row |= {"load": fleet.load, "reward": float(model.rollout_buffer.rewards.mean())}
            heads = model.policy.get_distribution(torch.as_tensor(fleet.seen)).distribution
            for name, head in zip(("server", "width", "group"), heads, strict=True):
                row[name] = head.entropy().mean().item()
        row |= {"accuracy": run.summary.accuracy or 0.0, "mean_ms": run.summary.mean_ms or 0.0}
        row["cost_ms"] = run.cost / NS_PER_MS / max(1, fleet.scenario.n_requests)
        curve.append(row)
        value = 0.0 if fleet.paper else -row["cost_ms"]
        if value >= most:
            most, best = value, router
            if checkpoint is not None:
                router.save(checkpoint)
        if progress is not None:
            progress(row)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other in layers of 64
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
    """PPO with the defaults of stable-baselines3 where nothing else is said."""
    model = Model(
        "MlpPolicy", fleet, n_steps=STEPS, batch_size=4096, n_epochs=4, learning_rate=1e-3,
        gamma=1.0, gae_lambda=0.98, ent_coef=0.005, device="cpu", seed=seed,
        policy_kwargs={"net_arch": [policy.HIDDEN] * 2},
    )  # fmt: skip
    net: Any = model.policy
    net.action_dist = Mixed(fleet.heads)
    if fleet.paper:  # one trunk
        net.mlp_extractor.value_net = net.mlp_extractor.policy_net
    fleet.net = net
    return model


class Model(PPO):
    """PPO whose rewards come after their decisions in paper mode."""

    def train(self) -> None:
        """Learn from a rollout; A = r - V in paper mode (reconstructed)."""
        fleet: Any = self.env
        if fleet.paper:
            self.rollout_buffer.rewards[:] = _PAPER_SCALE * fleet.settled
            self.rollout_buffer.compute_returns_and_advantage(torch.zeros(1), np.ones(1))
        super().train()


class Mixed(MultiCategoricalDistribution):
    """Independent heads; the server's is (1 - epsilon) softmax + epsilon / N."""

    epsilon = EPSILON

    def proba_distribution(self, action_logits: torch.Tensor) -> Mixed:
        """From the logits of all heads."""
        parts = [x.softmax(1) for x in action_logits.split(self.action_dims, dim=1)]
        parts[0] = (1 - self.epsilon) * parts[0] + self.epsilon / self.action_dims[0]
        self.distribution = [Categorical(probs, validate_args=False) for probs in parts]
        return self


class Fleet(VecEnv):
    """Simulators that are stepped together, from one decision to the next.

    What they call done is 1 - gamma_d: a discount is the chance that an episode goes on. In paper
    mode every decision is an episode, and its reward comes when its block is done: at the end of
    a rollout the policy goes on by itself until all of them are.
    """

    load = 1.0
    net: Any

    def __init__(
        self, scenarios: list[Scenario], mode: str, plan: Plan | None, seed: int, *, n: int
    ) -> None:
        first = self.scenario = scenarios[0]
        shape = self.shape = len(first.servers), first.n_segments, first.n_widths
        self.heads = [shape[0], shape[2], GROUPS]
        self.paper = mode != "flow"
        self.state = "paper" if self.paper else "extended"
        self.traces = [one.arrival for one in scenarios]
        self.size = min(REQUESTS, *map(len, self.traces))
        if not self.size:
            raise InputError("scenario: a trace without requests teaches nothing")
        self.rng = np.random.Generator(np.random.PCG64([seed, 2]))
        inputs, self.count, room = policy.sizes(self.state, *shape)
        short = first.replace(arrival_ms=first.arrival[: self.size] / NS_PER_MS)
        fresh = new_world(short, Router(), plan, None, seed, log=False)
        fresh = fresh._replace(weights=np.zeros(self.count + room))
        fresh.rule["server"], fresh.rule["inputs"] = rules.EXTERNAL, inputs
        fresh.rule["sampled"], fresh.rule["epsilon"] = 1, EPSILON
        self.arrival = np.zeros((n, self.size), np.int64)
        self.world = _many(fresh, n)._replace(arrival=frozen(self.arrival.view()))
        pairs = zip([*self.world.core, *self.world[1:]], [*fresh.core, *fresh[1:]], strict=True)
        self._own = [(one, new) for one, new in pairs if one.flags.writeable]
        self.goal, self.gain = _goal(first, mode)
        self.episode = np.zeros(n, EPISODE)
        self.owner = np.full((n, self.size + 1), -1, np.int64)
        self.settled, self.number = np.zeros((STEPS, n)), 0
        self.action = np.zeros((n, 3), np.int64)
        self.seen = np.zeros((n, inputs), np.float32)
        box = spaces.Box(-np.inf, np.inf, (inputs,))
        super().__init__(n, box, spaces.MultiDiscrete(self.heads))

    def policy(self) -> Policy:
        """As it is now; in paper mode the most likely decisions are far worse than drawn ones."""
        linear = (*self.net.mlp_extractor.policy_net[::2], self.net.action_net)
        parts = [part for one in linear for part in (one.weight.T, one.bias)]
        weights = np.concatenate([part.detach().numpy().ravel() for part in parts])
        return Policy(weights, *self.shape, self.state, EPSILON, self.paper)

    def set_load(self, load: float) -> None:
        """Requests come so much faster from now on: an episode is longer than a short training."""
        later = np.maximum(self.arrival - self.world.trace["now"], 0)
        self.arrival -= (later * (1 - self.load / load)).astype(np.int64)
        self.load = load

    def reset(self) -> Any:
        """Every environment at the beginning of a window of some trace."""
        for e in range(self.num_envs):
            self._restart(e)
        return self.seen.copy()

    def _restart(self, e: int) -> None:
        arrival = self.traces[self.rng.integers(len(self.traces))]
        at = self.rng.integers(len(arrival) - self.size + 1)
        self.arrival[e] = (arrival[at : at + self.size] - arrival[at]) / self.load
        for one, new in self._own:
            one[e] = new
        self.world.rule["random"][e] = self.rng.integers(1, rules.MODULUS)
        self.episode[e], self.owner[e] = 0, -1
        self._advance(e, e + 1)

    def _advance(self, first: int, last: int, *, alone: bool = False) -> None:
        step(
            self.world, self.episode, self.goal, self.owner, self.gain, self.settled,
            self.action, self.seen, first, last, -1 if alone else self.number,
        )  # fmt: skip

    def step_async(self, actions: Any) -> None:
        """Decide everywhere."""
        self.action[:] = actions

    def step_wait(self) -> Any:
        """Go on to the next decisions; what has ended begins anew."""
        self._advance(0, self.num_envs)
        self.number = (self.number + 1) % len(self.settled)
        if self.paper and self.number == 0:
            self.world.weights[:, : self.count] = self.policy().weights
            self._advance(0, self.num_envs, alone=True)
        reward, done = self.episode["reward"].astype(np.float32), self.episode["done"] > 0
        end = np.where(done | self.paper, 1.0, 1 - np.exp(self.episode["ns"] / -HORIZON_NS))
        for e in np.flatnonzero(done):
            self._restart(int(e))
        return self.seen.copy(), reward, end.astype(np.float32), self.reset_infos

    def _nothing(self, *given: Any, **named: Any) -> Any:
        """Environments have no attributes, methods or wrappers of their own; nothing is open."""
        return [None] * self.num_envs

    close = get_attr = set_attr = env_method = env_is_wrapped = _nothing


def _goal(scenario: Scenario, mode: str) -> tuple[Any, Any]:
    """The reward's factors, and what accuracy is worth (reconstructed).

    By segment and index of the widths so far, the last one repeated; above the mean of all tuples.
    """
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


GOAL: Final = np.dtype([("limit", "i8"), ("latency", "f8"), ("energy", "f8"), ("variance", "f8")])
EPISODE: Final = np.dtype([("ns", "i8"), ("open", "i8"), ("done", "i8"), ("reward", "f8")])
"""Time since the decision before, blocks without a reward, and of flow mode the reward."""


def _many(one: Any, n: int) -> Any:
    """So many worlds: every array with an axis more."""
    if isinstance(one, tuple):
        return type(one)(*(_many(part, n) for part in one))
    found = np.repeat(one[None], n, axis=0)
    return found if one.flags.writeable else frozen(found)


def _many_type(kind: Any) -> Any:
    if isinstance(kind, types.NamedTuple):
        return types.NamedTuple([_many_type(part) for part in kind.types], kind.instance_class)
    return types.Array(kind.dtype, kind.ndim + 1, "C", readonly=not kind.mutable)


WORLDS: Final = _many_type(WORLD)
_TABLE, _REALS, _SEEN = (types.Array(x, 2, "C") for x in (INT, types.float64, types.float32))


@helper(WORLD, WORLDS, INT)
def _one(many, e):  # type: ignore[no-untyped-def]
    """Views of environment e."""
    core = many.core
    return World(
        Core(
            core.state[e], core.server[e], core.instance[e], core.queue[e], core.block[e],
            core.command[e], core.cost[e], core.mmac[e], core.vram[e],
        ),
        many.trace[e], many.request[e], many.arrival[e], many.fifo[e], many.heap[e],
        many.transfer[e], many.feasible[e], many.rule[e], many.ladder[e], many.ladder_mmac[e],
        many.share[e], many.weights[e], many.batch_row[e], many.request_row[e],
        many.instance_row[e],
    )  # fmt: skip


@entry(
    NONE, WORLDS, records(EPISODE), records(GOAL), _TABLE, _REALS, _REALS, _TABLE, _SEEN,
    INT, INT, INT,
)  # fmt: skip
def step(  # type: ignore[no-untyped-def]
    many, episode, goals, owner, gain, settled, action, seen, first, last, number
):
    """Carry out the decisions of environments first..last-1, and go on to the next ones.

    ``owner[e, block]`` is the number of the decision that made a block, or -1. A negative `number`:
    the policy decides by itself until all blocks have their rewards. Flow mode has a limit.
    """
    goal = goals[0]
    for e in range(first, last):
        world = _one(many, e)
        trace, own, rule = world.trace[0], episode[e], world.rule[0]
        own.reward = _spent(world, goal) if trace.decisions else 0.0  # the first pays from 0 on
        begin, status = trace.now, ENDED
        if number < 0:
            trace.decision, rule.server = -1, rules.POLICY
        elif trace.decision == 1:
            policy.set_decision(world, action[e, 0], action[e, 1], action[e, 2])
            if not goal.limit:
                owner[e, world.core.state[0].free_block] = number
                own.open += 1
            elif trace.segment == len(gain) - 1:
                fifo = world.fifo[trace.queue]
                images = min(trace.group, fifo.images)
                own.reward += _gain(world, fifo.head, images, trace.segment, trace.width, gain)[0]
        while status == ENDED:
            if not own.open:
                rule.server = rules.EXTERNAL
            trace.horizon = NEVER - 1
            if not goal.limit:
                trace.horizon = _settle(world, own, goal, owner, gain, settled, e)
            status = advance(world)
        own.reward -= _spent(world, goal)
        own.ns, own.done = trace.now - begin, status != UNDECIDED
        if goal.limit and trace.arrived - trace.completed > goal.limit:
            own.reward -= goal.latency * goal.limit * HORIZON_NS  # as if they stayed for a horizon
            own.done = 1
        if not own.done:
            at = policy.features(world)
            for j in range(seen.shape[1]):
                seen[e, j] = world.weights[at + j]


@helper(counted=False)
def _spent(world, goal):  # type: ignore[no-untyped-def]
    """Requests in the system (Little's law) and power, integrated so far, at their prices."""
    found = goal.latency * world.trace[0].area
    for s in range(len(world.core.server)):
        found += goal.energy * world.core.server[s].energy
    return found


@helper(counted=False)
def _gain(world, r, images, k, w, gain):  # type: ignore[no-untyped-def]
    """What the accuracy of a block's requests is worth, and the first arrival."""
    found, oldest = 0.0, NEVER
    for _ in range(images):
        request = world.request[r]
        found += gain[k, request.tuple * world.core.state[0].widths + w]
        oldest = min(oldest, world.arrival[r])
        r = request.next
    return found, oldest


@helper(counted=False)
def _settle(world, own, goal, owner, gain, settled, e):  # type: ignore[no-untyped-def]
    """When the next event is, and the paper's reward (7) of the blocks that are done then."""
    trace = world.trace[0]
    core = world.core
    if trace.decision == 1:
        return trace.now
    at = min(trace.router_at, NEVER - 1)
    if trace.arrived < len(world.arrival):
        at = min(at, world.arrival[trace.arrived])
    if trace.pending:
        at = min(at, world.heap[0].at)
    watts, n = 0.0, len(core.server)
    for s in range(n):
        watts += core.server[s].watts / n
    mean = trace.load / n / UNIT
    variance = max(0.0, trace.squares / n / (1.0 * UNIT * UNIT) - mean * mean)
    for i in range(trace.pending):
        event = world.heap[i]
        if event.at != at or event.kind != DONE:
            continue
        b = core.instance[event.server, event.which].first
        while b >= 0:
            block, number = core.block[b], owner[e, b]
            if number >= 0:
                k, w = block.segment, block.width
                found, oldest = _gain(world, block.first, block.images, k, w, gain)
                reward = found / block.images
                reward -= goal.energy * min(watts * (at - oldest) * 1e-9, 100.0)
                reward -= goal.latency * min(at - oldest, 500_000_000)
                settled[number, e] = reward - goal.variance * variance
                owner[e, b] = -1
                own.open -= 1
            b = block.next
    return at
