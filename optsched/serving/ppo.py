"""Train a router by PPO on 128 simulators at a time (Schulman et al. 2017, stable-baselines3)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numba import types

from optsched.compiled import INT, entry, helper
from optsched.errors import InputError, MissingExtra
from optsched.limits import whole_number
from optsched.problems.routing import Routing
from optsched.problems.routing.problem import NS_PER_MS, POINTS
from optsched.serving import actor, rules
from optsched.serving.core import CORE, DONE, NEVER, NONE, UNIT, Core, records
from optsched.serving.policy import STATES, Policy
from optsched.serving.routers import Router
from optsched.serving.simulator import new_world, simulate
from optsched.serving.world import ASKED, ENDED, WORLD, World, advance

try:
    import torch
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.distributions import MultiCategoricalDistribution
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecEnv
except ImportError:
    raise MissingExtra("serving.train_router", "serving") from None

if TYPE_CHECKING:
    import os

    from optsched.problems.routing.plan import Plan

Row: TypeAlias = dict[str, float]

ENVIRONMENTS: Final = 128
STEPS: Final = 128
"""Decisions of every environment between two updates."""

REQUESTS: Final = 4096
"""Of an episode: a window of a trace."""

TRACES: Final = 16
"""That are taken from a function of a seed."""

HORIZON_NS: Final = 50e6
"""gamma_d = exp(-(t_{d+1} - t_d) / 50 ms): by decisions, small groups would be worth less."""

LIMIT: Final = 400
"""With more requests in the system an episode of the flow reward ends, and is punished."""

_A0, _POINTS, _L0, _E0 = 73.66, 6.13, 5e6, 1.0  # percent, points, ns, J
_SCALE = 0.1 * _L0 / HORIZON_NS  # returns of the flow reward are of the order of 1
_EVERY = 12  # updates between two measurements


class Weights(NamedTuple):
    """Of accuracy, latency, energy and variance: the paper's alpha, beta, gamma, delta."""

    accuracy: float
    latency: float
    energy: float
    variance: float


PRESETS: Final = {
    "paper": Weights(0.05, 1.0, 0.5, 0.2),
    "paper-relaxed": Weights(0.4, 0.3, 0.05, 0.2),
}


@dataclass(frozen=True)
class TrainedRouter:
    """A router, and what was measured while it learned.

    Parameters
    ----------
    policy
        The best one: of the least objective on a trace in ``flow`` mode, else of most reward.
    curves
        A row every 12 updates: ``decisions``, ``seconds``, ``load``, mean ``reward``, entropies of
        the heads ``server``, ``width`` and ``group``, and of a simulation of the first trace
        ``accuracy``, ``mean_ms`` and ``cost_ms``, the objective per request.
    """

    policy: Policy
    curves: list[Row]


def train_router(
    problem: Routing | Callable[[int], Routing],
    mode: str = "flow",
    *,
    decisions: int = 10_000_000,
    seed: int = 0,
    plan: Plan | None = None,
    teacher: Router | None = None,
    progress: Callable[[Row], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> TrainedRouter:
    """Learn which server, width and group each block gets.

    Parameters
    ----------
    problem
        A scenario, of whose trace episodes are windows, or a function that makes one from a seed;
        it is called with 0..15, and only the arrivals may differ.
    mode
        ``"flow"``: the scenario's own objective, by Little's law as an immediate reward (after
        Decima, Mao et al. 2019). ``"paper"`` and ``"paper-relaxed"``: the reward of Slim Scheduler
        after each block, without a future; reconstructed.
    decisions
        To learn from; rounded up to whole updates of 16,384.
    seed
        The same policy for the same seed and machine; also seeds torch's and numpy's own streams.
    plan
        Instances that are resident from the beginning.
    teacher
        A router to imitate on 200,000 decisions before.
    progress
        Called with every row of the curves.
    checkpoint
        Where the best policy so far is kept.

    Returns
    -------
    TrainedRouter
        After Ctrl-C that of the decisions so far.

    Raises
    ------
    MissingExtra
        stable-baselines3 is not installed.
    """
    if mode not in ("flow", *PRESETS):
        raise InputError(f"mode: expected flow, {', '.join(PRESETS)}, got {mode!r:.60}")
    decisions = whole_number("decisions", decisions, 1, 10**12)
    seed = whole_number("seed", seed, 0, 2**31 - 1)
    problems = [problem] if isinstance(problem, Routing) else [problem(i) for i in range(TRACES)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other in layers of 64
    try:
        fleet = Fleet(problems, mode, plan, seed, teacher=teacher)
        model = make_model(fleet, seed)
        watch = _Watch(fleet, decisions, plan, progress, checkpoint)
        try:
            if teacher is not None:
                _imitate(model, fleet)
            model.learn(decisions, callback=watch)
        except KeyboardInterrupt:
            pass
        watch.measure()
    finally:
        torch.set_num_threads(threads)
    return TrainedRouter(watch.best, watch.curves)


def make_model(fleet: Fleet, seed: int) -> PPO:
    """PPO with the defaults of stable-baselines3 where nothing else is said."""
    shared = fleet.paper
    layers = [] if shared else [actor.HIDDEN] * 2
    model = PPO(
        ActorCritic, fleet, n_steps=STEPS, batch_size=4096, n_epochs=4, learning_rate=1e-3,
        gamma=1.0, ent_coef=0.005, rollout_buffer_class=Rollouts, device="cpu", seed=seed,
        rollout_buffer_kwargs={"fleet": fleet},
        policy_kwargs={
            "features_extractor_class": Trunk, "features_extractor_kwargs": {"shared": shared},
            "net_arch": {"pi": layers, "vf": layers}, "fleet": fleet,
        },
    )  # fmt: skip
    fleet.weights = lambda: flat(model.policy)
    return model


class _Watch(BaseCallback):
    """Sets load and entropy bonus, measures, and keeps the best policy."""

    def __init__(self, fleet: Fleet, decisions: int, plan: Any, progress: Any, path: Any) -> None:
        super().__init__()
        self.fleet, self.decisions, self.plan = fleet, decisions, plan
        self.progress, self.path = progress, path
        self.curves: list[Row] = []
        self.began, self.most = time.perf_counter(), -math.inf
        self.best: Policy
        self.row: Row = {}

    def _on_training_start(self) -> None:
        self.measure()

    def _on_rollout_start(self) -> None:
        done = min(1.0, self.num_timesteps / self.decisions)
        if not self.fleet.paper:
            self.fleet.load = 1.0 if self.fleet.taught else min(1.0, 0.2 + 2.0 * done)
            self.model.ent_coef = 0.01 * 0.05**done  # type: ignore[attr-defined]

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer  # type: ignore[attr-defined]
        with torch.no_grad():
            heads = self.model.policy.get_distribution(torch.as_tensor(buffer.observations[-1]))
        self.row = {"load": self.fleet.load, "reward": float(buffer.rewards.mean())}
        for name, head in zip(("server", "width", "group"), heads.distribution, strict=True):
            self.row[name] = float(head.entropy().mean())
        if self.n_calls // STEPS % _EVERY == 0:
            self.measure()

    def measure(self) -> None:
        """Simulate the policy of now on a trace."""
        fleet = self.fleet
        policy = fleet.policy(sampled=fleet.paper)
        run = simulate(fleet.problem, policy, plan=self.plan, seed=1, log=False)
        row = {"decisions": float(self.num_timesteps), "seconds": time.perf_counter() - self.began}
        row |= self.row
        row |= {"accuracy": run.summary.accuracy or 0.0, "mean_ms": run.summary.mean_ms or 0.0}
        row["cost_ms"] = run.cost / NS_PER_MS / max(1, fleet.problem.n_requests)
        self.curves.append(row)
        value = row.get("reward", -math.inf) if policy.sampled else -row["cost_ms"]
        if value >= self.most:
            self.most, self.best = value, policy
            if self.path is not None:
                policy.save(self.path)
        if self.progress is not None:
            self.progress(row)


def _imitate(model: PPO, fleet: Fleet, steps: int = 512, rounds: int = 3, epochs: int = 8) -> None:
    """Behaviour cloning of the teacher; the critic learns what the teacher reaches."""
    policy, seen = model.policy, fleet.reset()
    fleet.load = 1.0
    kept: list[Any] = []
    for _ in range(rounds):
        rows: list[Any] = []
        for _ in range(steps):
            advice = fleet.advice.copy()
            following, reward, done, _ = fleet.step(advice)
            rows.append((seen, advice, reward, np.where(done, 0.0, fleet.discount)))
            seen = following
        with torch.no_grad():
            value = policy.predict_values(torch.as_tensor(seen)).numpy().ravel()
        for seen_, advice, reward, discount in reversed(rows):
            value = reward + discount * value
            kept.append((seen_, advice, value.astype(np.float32)))
        parts = [torch.as_tensor(np.concatenate(part)) for part in zip(*kept, strict=True)]
        for _ in range(epochs):
            for at in torch.randperm(len(parts[0])).split(1024):
                observed, wanted, returns = (part[at] for part in parts)
                values, likely, entropy = policy.evaluate_actions(observed, wanted)
                loss = 0.5 * (values.ravel() - returns).square().mean()
                loss = loss - likely.mean() - 0.05 * entropy.mean()  # type: ignore[union-attr]
                policy.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                policy.optimizer.step()


class Trunk(BaseFeaturesExtractor):
    """Keeps the head's segment, which masks servers, from the network; the paper's one trunk."""

    def __init__(self, space: spaces.Box, shared: bool) -> None:
        n, m = space.shape[0] - 1, actor.HIDDEN
        super().__init__(space, m if shared else n)
        tanh, linear = torch.nn.Tanh, torch.nn.Linear
        layers = (linear(n, m), tanh(), linear(m, m), tanh()) if shared else ()
        self.layers = torch.nn.Sequential(*layers)
        self.segment = torch.zeros(0, dtype=torch.long)

    def forward(self, observed: torch.Tensor) -> torch.Tensor:
        self.segment = observed[:, -1].long()
        return self.layers(observed[:, :-1])  # type: ignore[no-any-return]


class Mixed(MultiCategoricalDistribution):
    """Independent heads; the server's is (1 - epsilon) softmax + epsilon / N over the feasible."""

    epsilon: float
    allowed: torch.Tensor

    def proba_distribution(self, action_logits: torch.Tensor) -> Mixed:
        """From the logits of all heads."""
        server, *others = action_logits.split(self.action_dims, dim=1)
        chosen = server.masked_fill(~self.allowed, -1e30).softmax(1)
        even = self.allowed / self.allowed.sum(1, keepdim=True)
        mixed = torch.lerp(chosen, even, self.epsilon)
        make = torch.distributions.Categorical
        self.distribution = [
            make(mixed, validate_args=False),
            *(make(logits=one, validate_args=False) for one in others),
        ]
        return self


class ActorCritic(ActorCriticPolicy):
    """The policy of stable-baselines3 with that distribution."""

    def __init__(self, *given: Any, fleet: Fleet, **named: Any) -> None:
        self.fleet = fleet
        super().__init__(*given, **named)
        self.feasible = torch.as_tensor(fleet.world.feasible[:, :, 0].T.copy())

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = Mixed(self.action_space.nvec.tolist())  # type: ignore[attr-defined]
        self.action_dist.epsilon = self.fleet.epsilon
        super()._build(lr_schedule)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor) -> Any:
        trunk: Any = self.features_extractor
        self.action_dist.allowed = self.feasible[trunk.segment]  # type: ignore[union-attr]
        return super()._get_action_dist_from_latent(latent_pi)


def flat(policy: Any) -> Any:
    """The actor's parameters as `Policy` has them."""
    layers = [*policy.features_extractor.layers, *policy.mlp_extractor.policy_net]
    linear = [one for one in [*layers, policy.action_net] if isinstance(one, torch.nn.Linear)]
    parts = [part for one in linear for part in (one.weight.T.ravel(), one.bias)]
    return torch.cat(parts).detach().numpy().astype(np.float64)


class Rollouts(RolloutBuffer):
    """Discounts by time; in paper mode the rewards of blocks that are done later."""

    def __init__(self, *given: Any, fleet: Fleet, **named: Any) -> None:
        self.fleet = fleet
        super().__init__(*given, **named)

    def reset(self) -> None:
        """Begin a rollout."""
        super().reset()
        self.discount = np.zeros((self.buffer_size, self.n_envs), np.float32)
        self.fleet.begin(self.buffer_size)

    def add(self, *given: Any, **named: Any) -> None:
        """Keep a step of all environments, and how long it took."""
        self.discount[self.pos] = self.fleet.discount
        super().add(*given, **named)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        """GAE with gamma_d (R); in paper mode A = r - V."""
        if self.fleet.paper:
            self.rewards[:] = self.fleet.settle()
            self.returns[:] = self.rewards
            self.advantages = self.returns - self.values
            return
        value = np.vstack([self.values[1:], last_values.numpy().reshape(1, -1)])
        goes_on = self.discount * (1 - np.vstack([self.episode_starts[1:], dones[None]]))
        delta = self.rewards + goes_on * value - self.values
        later = np.zeros(self.n_envs, np.float32)
        for step in reversed(range(self.buffer_size)):
            later = delta[step] + goes_on[step] * self.gae_lambda * later
            self.advantages[step] = later
        self.returns = self.advantages + self.values


class Fleet(VecEnv):
    """Simulators that are stepped together, from one decision to the next."""

    epsilon = 0.05
    render_mode = None

    def __init__(
        self, problems: list[Routing], mode: str, plan: Plan | None, seed: int, *,
        teacher: Router | None = None, n: int = ENVIRONMENTS,
    ) -> None:  # fmt: skip
        first = self.problem = problems[0]
        shape = self.shape = len(first.servers), first.n_segments, first.n_widths
        self.paper, self.taught = mode != "flow", teacher is not None
        self.state = "paper" if self.paper else "extended"
        self.traces = [one.arrival for one in problems]
        self.size = min(REQUESTS, *map(len, self.traces), REQUESTS)
        if not self.size:
            raise InputError("problem: a trace without requests teaches nothing")
        self.load = 1.0
        self.rng = np.random.Generator(np.random.PCG64([seed, 2]))
        inputs = actor.inputs(STATES[self.state], shape[0], shape[1])
        heads = shape[0] + shape[2] + actor.GROUPS
        self._room = actor.room(inputs, heads)
        short = first.replace(arrival_ms=first.arrival[: self.size] / NS_PER_MS)
        fresh = new_world(short, teacher or Router(), plan, None, seed, log=False)
        self.goal = _goal(first, mode, int(fresh.rule["server"][0]) if teacher else rules.OUTSIDE)
        fresh.rule["server"], fresh.rule["state"] = rules.OUTSIDE, STATES[self.state]
        weights = np.zeros(actor.parameters(inputs, heads) + self._room)
        self.weights: Callable[[], Any] = lambda: weights[: -self._room]
        self._fresh = fresh._replace(weights=weights)
        self.world = _map(lambda one: np.repeat(one[None], n, axis=0), self._fresh)
        self.episode = np.zeros(n, EPISODE)
        self.owner = np.full((n, self.size + 1), -1, np.int64)
        self.prefix = _prefix_accuracy(first)
        self.settled = np.zeros((0, n))
        self.step_number = 0
        self.action, self.advice = np.zeros((2, n, 3), np.int64)
        self.seen = np.zeros((n, inputs + 1), np.float32)
        self.discount = np.ones(n, np.float32)
        super().__init__(
            n, spaces.Box(-np.inf, np.inf, self.seen.shape[1:], np.float32),
            spaces.MultiDiscrete([shape[0], shape[2], actor.GROUPS]),
        )  # fmt: skip

    def policy(self, *, sampled: bool) -> Policy:
        """As it is now."""
        return Policy(self.weights(), *self.shape, self.state, self.epsilon, sampled)

    def reset(self) -> Any:
        """Every environment at the beginning of a window of some trace."""
        for e in range(self.num_envs):
            self._restart(e)
        return self.seen.copy()

    def _restart(self, e: int) -> None:
        arrival = self.traces[self.rng.integers(len(self.traces))]
        at = self.rng.integers(len(arrival) - self.size + 1)
        window = (arrival[at : at + self.size] - arrival[at]) / self.load
        start = self._fresh._replace(arrival=window.astype(np.int64))
        for to, source in zip(_arrays(self.world), _arrays(start), strict=True):
            to[e] = source
        self.episode[e], self.owner[e] = 0, -1
        self._advance(e, e + 1)

    def _advance(self, first: int, last: int) -> None:
        step(
            _read_only(self.world), self.episode, self.goal, self.owner, self.prefix, self.settled,
            self.action, self.advice, self.seen, first, last, self.step_number,
        )  # fmt: skip

    def step_async(self, actions: Any) -> None:
        """Decide everywhere."""
        self.action[:] = actions

    def step_wait(self) -> Any:
        """Go on to the next decisions; what has ended begins anew."""
        self._advance(0, self.num_envs)
        self.step_number += 1
        reward = self.episode["reward"].astype(np.float32)
        done = self.episode["done"] > 0
        self.discount = np.exp(self.episode["ns"] / -HORIZON_NS).astype(np.float32)
        for e in np.flatnonzero(done):
            self._restart(int(e))
        return self.seen.copy(), reward, done, self.reset_infos

    def begin(self, steps: int) -> None:
        """Forget the blocks under way: rewards are of the next so many decisions."""
        self.owner[:], self.episode["open"], self.step_number = -1, 0, 0
        self.settled = np.zeros((steps, self.num_envs))

    def settle(self) -> Any:
        """Rewards of all blocks since `begin`; of those under way by copies of the simulators."""
        world = _map(np.copy, self.world)
        world.rule["server"], world.rule["sampled"] = rules.POLICY, 1
        world.rule["epsilon"] = self.epsilon
        world.rule["random"] = self.rng.integers(1, rules.MODULUS, world.rule.shape)
        world = world._replace(weights=np.append(self.weights(), np.zeros(self._room)))
        finish(
            _read_only(world), self.episode.copy(), self.goal, self.owner.copy(), self.prefix,
            self.settled,
        )  # fmt: skip
        return self.settled

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """One for every environment."""
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Of all environments."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *given: Any, indices: Any = None, **named: Any) -> Any:
        """Environments have no methods of their own."""
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """None is."""
        return [False] * self.num_envs


def _goal(problem: Routing, mode: str, teacher: int) -> Any:
    """The reward's factors (R)."""
    found = np.zeros(1, GOAL)
    found["base"], found["teacher"] = problem.accuracy.mean() / POINTS, teacher
    if mode != "flow":
        weights = PRESETS[mode]
        found["paper"], found["variance"] = 1, weights.variance
        found["accuracy"], found["latency"] = weights.accuracy / _POINTS, weights.latency / _L0
        found["energy"] = weights.energy / _E0
        return found
    price = _SCALE * NS_PER_MS / _L0  # of a ms of one request
    found["accuracy"], found["energy"] = problem.ms_per_point * price, problem.ms_per_joule * price
    found["latency"], found["limit"] = _SCALE / _L0, LIMIT
    found["penalty"] = found["latency"] * LIMIT * HORIZON_NS  # as if they stayed for a horizon
    return found


def _prefix_accuracy(problem: Routing) -> Any:
    """Percent by segment and index of the widths so far, the last one repeated (R)."""
    k, n = problem.n_segments, problem.n_widths
    found = np.zeros((k, n**k))
    for j in range(k):
        index = np.arange(n ** (j + 1))
        for _ in range(k - 1 - j):
            index = index * n + index % n
        found[j, : n ** (j + 1)] = problem.accuracy[index] / POINTS
    return found


# batched worlds: arrays with an axis more, but for what all have in common

_COMMON: Final = {
    "core", "cost", "mmac", "vram", "transfer", "feasible", "ladder", "ladder_mmac", "share",
    "weights",
}  # fmt: skip
EPISODE: Final = np.dtype(
    [(name, "i8") for name in ("at", "ns", "area", "open", "done")]
    + [(name, "f8") for name in ("energy", "variance", "reward")]
)
"""Of an environment: time and integrals at its last decision; blocks without a reward yet."""

GOAL: Final = np.dtype(
    [(name, "i8") for name in ("paper", "teacher", "limit")]
    + [(name, "f8") for name in ("accuracy", "base", "latency", "energy", "variance", "penalty")]
)


def _map(change: Callable[[Any], Any], world: World) -> World:
    """A world with other arrays."""

    def changed(given: Any) -> Any:
        rows = zip(given._fields, given, strict=True)
        return type(given)(*(one if name in _COMMON else change(one) for name, one in rows))

    return changed(world)._replace(core=changed(world.core))  # type: ignore[no-any-return]


def _arrays(world: World) -> list[Any]:
    parts: list[Any] = []
    _map(parts.append, world)
    return parts


def _read_only(world: World) -> World:
    arrival = world.arrival.view()
    arrival.setflags(write=False)
    return world._replace(arrival=arrival)


def _stacked(kind: Any) -> Any:
    """The type of many worlds."""
    rows = zip(kind.instance_class._fields, kind.types, strict=True)
    return types.NamedTuple(
        tuple(
            one if name in _COMMON
            else types.Array(one.dtype, one.ndim + 1, "C", readonly=not one.mutable)
            for name, one in rows
        ),
        kind.instance_class,
    )  # fmt: skip


CORES: Final = _stacked(CORE)
WORLDS: Final = types.NamedTuple((CORES, *_stacked(WORLD).types[1:]), World)
_TABLE: Final = types.Array(types.int64, 2, "C")
_REALS: Final = types.Array(types.float64, 2, "C")


@helper(WORLD, WORLDS, INT)
def _one(many, e):  # type: ignore[no-untyped-def]
    """Views of environment e."""
    core = many.core
    return World(
        Core(
            core.state[e], core.server[e], core.instance[e], core.queue[e], core.block[e],
            core.command[e], core.cost, core.mmac, core.vram,
        ),
        many.trace[e], many.request[e], many.arrival[e], many.fifo[e], many.heap[e],
        many.transfer, many.feasible, many.rule[e], many.ladder, many.ladder_mmac, many.share,
        many.weights, many.batch_row[e], many.request_row[e], many.instance_row[e],
    )  # fmt: skip


@entry(
    NONE, WORLDS, records(EPISODE), records(GOAL), _TABLE, _REALS, _REALS, _TABLE, _TABLE,
    types.Array(types.float32, 2, "C"), INT, INT, INT,
)  # fmt: skip
def step(  # type: ignore[no-untyped-def]
    many, episode, goal, owner, prefix, settled, action, advice, seen, first, last, number
):
    """Carry out the decisions of environments first..last-1, and go on to the next ones.

    ``owner[e, block]`` is the number of the decision that made a block, or -1.
    """
    goals = goal[0]
    for e in range(first, last):
        world = _one(many, e)
        own = episode[e]
        trace = world.trace[0]
        own.reward = 0.0
        asked = trace.asked == 1
        if asked:
            actor.set_decision(world, action[e, 0], action[e, 1], action[e, 2])
            if goals.paper:
                owner[e, world.core.state[0].free_block] = number
                own.open += 1
            elif trace.segment == len(prefix) - 1:
                own.reward = goals.accuracy * _gain(world, prefix, goals.base)
        if goals.paper:
            status = _settle_on(world, own, goals, owner, prefix, settled, e, False)
        else:
            status = advance(world)
        own.done = status != ASKED
        if asked and not goals.paper:
            _flow(world, own, goals)
        own.ns = trace.now - own.at
        own.at = trace.now
        if own.done:
            continue
        at = actor.features(world)
        n = seen.shape[1] - 1
        for j in range(n):
            seen[e, j] = world.weights[at + j]
        seen[e, n] = trace.segment
        if goals.teacher != rules.OUTSIDE:
            rule = world.rule[0]
            rule.server = goals.teacher
            rules.decide(world)
            rule.server = rules.OUTSIDE
            advice[e, 0], advice[e, 1], advice[e, 2] = trace.server, trace.width, 0
            while 1 << (advice[e, 2] + 1) <= trace.group and advice[e, 2] < actor.GROUPS - 1:
                advice[e, 2] += 1


@helper(counted=False)
def _gain(world, prefix, base):  # type: ignore[no-untyped-def]
    """Accuracy above the mean of all tuples, over the requests that the decision finishes."""
    trace = world.trace[0]
    fifo = world.fifo[trace.queue]
    r, found = fifo.head, 0.0
    widths = world.core.state[0].widths
    for _ in range(min(trace.group, fifo.images)):
        request = world.request[r]
        found += prefix[len(prefix) - 1, request.tuple * widths + trace.width] - base
        r = request.next
    return found


@helper(counted=False)
def _flow(world, own, goal):  # type: ignore[no-untyped-def]
    """Requests, power and variance of U, integrated since the last decision (Little's law)."""
    trace = world.trace[0]
    energy = 0.0
    for s in range(len(world.core.server)):
        energy += world.core.server[s].energy
    own.reward -= goal.latency * (trace.area - own.area)
    own.reward -= goal.energy * (energy - own.energy)
    own.area, own.energy = trace.area, energy
    if trace.arrived - trace.completed > goal.limit:
        own.reward -= goal.penalty
        own.done = 1


@helper(counted=False)
def _settle_on(world, own, goal, owner, prefix, settled, e, only):  # type: ignore[no-untyped-def]
    """`advance`, one event at a time, with the rewards of the blocks that are done.

    `only` until no block lacks its reward.
    """
    trace = world.trace[0]
    status = ENDED
    while status == ENDED and (own.open or not only):
        at = world.heap[0].at if trace.pending else NEVER - 1
        trace.horizon = at - 1
        status = advance(world)
        if status == ENDED:
            for i in range(trace.pending):
                event = world.heap[i]
                if event.at == at and event.kind == DONE:
                    _settle(world, own, goal, owner, prefix, settled, e, event)
            trace.horizon = at
            status = advance(world)
    trace.horizon = NEVER - 1
    return status


@helper(counted=False)
def _settle(world, own, goal, owner, prefix, settled, e, event):  # type: ignore[no-untyped-def]
    """The paper's reward (7) of every block of a batch that is about to be done (R)."""
    core = world.core
    s, n = event.server, len(core.server)
    watts, load, squares = 0.0, 0.0, 0.0
    for i in range(n):
        u = min(core.server[i].load / UNIT, 1.0)
        watts += core.server[i].watts / n
        load += u / n
        squares += u * u / n
    b = core.instance[s, event.which].first
    while b >= 0:
        block = core.block[b]
        number = owner[e, b]
        if number >= 0:
            r, oldest, accuracy = block.first, NEVER, 0.0
            for _ in range(block.images):
                request = world.request[r]
                index = request.tuple * core.state[0].widths + block.width
                accuracy += prefix[block.segment, index] / block.images
                oldest = min(oldest, world.arrival[r])
                r = request.next
            ns = min(event.at - oldest, 500_000_000)
            reward = goal.accuracy * (accuracy - goal.base) - goal.latency * ns
            reward -= goal.energy * min(watts * (event.at - oldest) * 1e-9, 100.0)
            settled[number, e] = reward - goal.variance * max(0.0, squares - load * load)
            owner[e, b] = -1
            own.open -= 1
        b = block.next


@entry(NONE, WORLDS, records(EPISODE), records(GOAL), _TABLE, _REALS, _REALS)
def finish(many, episode, goal, owner, prefix, settled):  # type: ignore[no-untyped-def]
    """Go on everywhere, with the policy's own decisions, until all blocks have their rewards."""
    for e in range(len(episode)):
        world = _one(many, e)
        if episode[e].open:
            rules.decide(world)
            _settle_on(world, episode[e], goal[0], owner, prefix, settled, e, True)
