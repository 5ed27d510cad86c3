"""Train a router by PPO (Schulman et al. 2017, stable-baselines3) on 128 simulators at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numba import types

from optsched.compiled import INT, entry, helper
from optsched.errors import InputError, MissingExtra
from optsched.limits import whole_number
from optsched.problems.routing import Routing
from optsched.problems.routing.checks import frozen
from optsched.problems.routing.problem import NS_PER_MS, POINTS
from optsched.serving import actor, rules
from optsched.serving.core import CORE, DONE, NEVER, NONE, UNIT, Core, records
from optsched.serving.policy import STATES, Policy
from optsched.serving.routers import CompiledRouter, MarginalCost
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
    from torch.distributions import Categorical
except ImportError:
    raise MissingExtra("serving.train_router", "serving") from None

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from optsched.problems.routing.plan import Plan

Row: TypeAlias = dict[str, float]

TEACHER: Final = MarginalCost()
PRESETS: Final = {"paper": (0.05, 1.0, 0.5, 0.2), "paper-relaxed": (0.4, 0.3, 0.05, 0.2)}
"""Weights of accuracy, latency, energy and variance: the paper's alpha, beta, gamma, delta."""

ENVIRONMENTS, STEPS = 128, 128  # decisions of each between two updates
REQUESTS, TRACES = 4096, 16  # an episode is a window of so many of one of these
LIMIT: Final = 400
"""With more requests in the system an episode of the flow reward ends, and is punished."""

HORIZON_NS: Final = 50e6
"""gamma_d = exp(-(t_{d+1} - t_d) / 50 ms): by decisions, small groups would be worth less."""

_POINTS, _L0 = 6.13, 5e6  # percent and ns that count 1
_SCALE = 0.1 * _L0 / HORIZON_NS  # returns of the flow reward are of the order of 1
_PAPER_SCALE = 0.05  # or the critic's error drowns the actor in the trunk that they share
_EVERY = 12


@dataclass(frozen=True)
class TrainedRouter:
    """A router, and what was measured while it learned.

    Parameters
    ----------
    policy
        In ``flow`` mode that of the least objective on the first trace, else of the most reward.
    curves
        A row every 12 updates: ``decisions``, ``seconds``, ``load``, mean ``reward``, entropies of
        the heads ``server``, ``width`` and ``group``, and of the first trace ``accuracy``,
        ``mean_ms`` and ``cost_ms``, the objective per request.
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
    teacher: CompiledRouter | None = TEACHER,
    progress: Callable[[Row], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> TrainedRouter:
    """Learn which server, width and group each block gets.

    Parameters
    ----------
    problem
        A scenario, of whose trace episodes are windows, or a function that makes one from a seed,
        called with 0..15; only the arrivals may differ.
    mode
        ``"flow"``: the scenario's own objective, by Little's law as an immediate reward (after
        Decima, Mao et al. 2019). ``"paper"``, ``"paper-relaxed"``: the reward of Slim Scheduler
        after each block, without a future, from its smaller state (reconstructed).
    decisions
        To learn from; rounded up to whole updates of 16,384.
    seed
        The same policy for the same seed; torch's and numpy's global streams are seeded too.
    plan
        Instances that are resident from the beginning.
    teacher
        In ``flow`` mode a router to imitate on 200,000 decisions before; None: nobody, and the
        load grows from 20 % to 100 %.
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
        teacher = teacher if mode == "flow" else None
        fleet = Fleet(problems, mode, plan, seed, teacher=teacher, n=ENVIRONMENTS)
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
    model = PPO(
        ActorCritic, fleet, n_steps=STEPS, batch_size=4096, n_epochs=4, learning_rate=1e-3,
        gamma=1.0, gae_lambda=0.98, ent_coef=0.005, rollout_buffer_class=Rollouts, device="cpu",
        seed=seed, rollout_buffer_kwargs={"fleet": fleet},
        policy_kwargs={
            "net_arch": [actor.HIDDEN] * 2, "features_extractor_class": Features, "fleet": fleet
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
        model: Any = self.model
        buffer = model.rollout_buffer
        with torch.no_grad():
            heads = model.policy.get_distribution(torch.as_tensor(buffer.observations[-1]))
        self.row = {"load": self.fleet.load, "reward": float(buffer.rewards.mean())}
        for name, head in zip(("server", "width", "group"), heads.distribution, strict=True):
            self.row[name] = float(head.entropy().mean())
        if self.n_calls // STEPS % _EVERY == 0:
            self.measure()

    def measure(self) -> None:
        """Simulate the policy of now on the first trace."""
        problem, policy = self.fleet.problem, self.fleet.policy(sampled=self.fleet.paper)
        run = simulate(problem, policy, plan=self.plan, seed=1, log=False)
        row = {"decisions": float(self.num_timesteps), "seconds": time.perf_counter() - self.began}
        row |= self.row
        row |= {"accuracy": run.summary.accuracy or 0.0, "mean_ms": run.summary.mean_ms or 0.0}
        row["cost_ms"] = run.cost / NS_PER_MS / max(1, problem.n_requests)
        self.curves.append(row)
        value = row.get("reward", -math.inf) if self.fleet.paper else -row["cost_ms"]
        if value >= self.most:
            self.most, self.best = value, policy
            if self.path is not None:
                policy.save(self.path)
        if self.progress is not None:
            self.progress(row)


def _imitate(model: PPO, fleet: Fleet, steps: int = 512, rounds: int = 3, epochs: int = 4) -> None:
    """Behaviour cloning of the teacher; the critic learns what the teacher reaches."""
    policy, seen = model.policy, fleet.reset()
    kept: list[Any] = []
    for _ in range(rounds):
        rows = []
        for _ in range(steps):
            advice, before = fleet.advice.copy(), seen
            seen, reward, done, _ = fleet.step(advice)
            rows.append((before, advice, reward, np.where(done, 0.0, fleet.discount)))
        with torch.no_grad():
            value = policy.predict_values(torch.as_tensor(seen)).numpy().ravel()
        for before, advice, reward, discount in reversed(rows):
            value = reward + discount * value
            kept.append((before, advice, value.astype(np.float32)))
        parts = [torch.as_tensor(np.concatenate(part)) for part in zip(*kept, strict=True)]
        for _ in range(epochs):
            for at in torch.randperm(len(parts[0])).split(1024):
                values, likely, entropy = policy.evaluate_actions(parts[0][at], parts[1][at])
                assert entropy is not None
                loss = 0.5 * (values.ravel() - parts[2][at]).square().mean()
                loss = loss - likely.mean() - 0.3 * entropy.mean()
                policy.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                policy.optimizer.step()


class Features(BaseFeaturesExtractor):
    """Keeps the head's segment, by which servers are masked, from the networks."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, space.shape[0] - 1)
        self.segment = torch.zeros(0, dtype=torch.long)

    def forward(self, observed: torch.Tensor) -> torch.Tensor:
        """All but the last column."""
        self.segment = observed[:, -1].long()
        return observed[:, :-1]


class Mixed(MultiCategoricalDistribution):
    """Independent heads; the server's is (1 - epsilon) softmax + epsilon / N over the feasible."""

    epsilon: float
    allowed: torch.Tensor

    def proba_distribution(self, action_logits: torch.Tensor) -> Mixed:
        """From the logits of all heads."""
        server, *others = action_logits.split(self.action_dims, dim=1)
        chosen = server.masked_fill(~self.allowed, -1e30).softmax(1)
        even = self.allowed / self.allowed.sum(1, keepdim=True)
        heads = [
            {"probs": torch.lerp(chosen, even, self.epsilon)},
            *({"logits": x} for x in others),
        ]
        self.distribution = [Categorical(**head, validate_args=False) for head in heads]
        return self


class ActorCritic(ActorCriticPolicy):
    """The policy of stable-baselines3 with that distribution; in paper mode with one trunk."""

    def __init__(self, *given: Any, fleet: Fleet, **named: Any) -> None:
        self.fleet = fleet
        super().__init__(*given, **named)

    def _build_mlp_extractor(self) -> None:
        space: Any = self.action_space
        self.heads = self.action_dist = Mixed(space.nvec.tolist())
        self.heads.epsilon = self.fleet.epsilon
        self.feasible = torch.as_tensor(self.fleet.world.feasible[:, :, 0].T.copy())
        super()._build_mlp_extractor()
        if self.fleet.paper:
            self.mlp_extractor.value_net = self.mlp_extractor.policy_net

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor) -> Any:
        extractor: Any = self.features_extractor
        self.heads.allowed = self.feasible[extractor.segment]
        return super()._get_action_dist_from_latent(latent_pi)


def flat(policy: Any) -> Any:
    """The actor's parameters as `Policy` has them."""
    linear = (*policy.mlp_extractor.policy_net[::2], policy.action_net)
    parts = [part for one in linear for part in (one.weight.T, one.bias)]
    return np.concatenate([part.detach().numpy().ravel() for part in parts], dtype=np.float64)


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
        """GAE with gamma_d; in paper mode A = r - V (both reconstructed)."""
        if self.fleet.paper:
            self.rewards[:] = _PAPER_SCALE * self.fleet.settle()
            self.advantages = self.rewards - self.values
        else:
            value = np.vstack([self.values[1:], last_values.numpy().reshape(1, -1)])
            goes_on = self.discount * (1 - np.vstack([self.episode_starts[1:], dones[None]]))
            later = np.zeros(self.n_envs, np.float32)
            for step in reversed(range(self.buffer_size)):
                delta = self.rewards[step] + goes_on[step] * value[step] - self.values[step]
                later = delta + goes_on[step] * self.gae_lambda * later
                self.advantages[step] = later
        self.returns = self.advantages + self.values


class Fleet(VecEnv):
    """Simulators that are stepped together, from one decision to the next."""

    epsilon = 0.05
    render_mode = None

    def __init__(
        self, problems: list[Routing], mode: str, plan: Plan | None, seed: int, *,
        n: int, teacher: CompiledRouter | None = None,
    ) -> None:  # fmt: skip
        first = self.problem = problems[0]
        shape = self.shape = len(first.servers), first.n_segments, first.n_widths
        self.paper, self.taught, self.load = mode != "flow", teacher is not None, 1.0
        self.state = "paper" if self.paper else "extended"
        self.traces = [one.arrival for one in problems]
        self.size = min(REQUESTS, min(map(len, self.traces)))
        if not self.size:
            raise InputError("problem: a trace without requests teaches nothing")
        self.rng = np.random.Generator(np.random.PCG64([seed, 2]))
        count, room = actor.sizes(STATES[self.state], *shape)
        short = first.replace(arrival_ms=first.arrival[: self.size] / NS_PER_MS)
        fresh = new_world(short, teacher or TEACHER, plan, None, seed, log=False)
        self.goal = _goal(first, mode)
        self.goal["teacher"] = fresh.rule["server"][0] if teacher else rules.OUTSIDE
        fresh.rule["server"], fresh.rule["state"] = rules.OUTSIDE, STATES[self.state]
        own = fresh.weights  # the teacher's, in the place of a policy's
        fresh = fresh._replace(weights=np.zeros(max(count, len(own)) + room))
        fresh.weights[: len(own)] = own
        self.weights: Callable[[], Any] = lambda: fresh.weights[:count]
        self.arrival = np.zeros((n, self.size), np.int64)
        self.world = _many(fresh, n)._replace(arrival=frozen(self.arrival.view()))
        pairs = zip([*self.world.core, *self.world[1:]], [*fresh.core, *fresh[1:]], strict=True)
        self._own = [(one, new) for one, new in pairs if one is not new and one.flags.writeable]
        self.episode = np.zeros(n, EPISODE)
        self.owner = np.full((n, self.size + 1), -1, np.int64)
        self.prefix = _prefix_accuracy(first)
        self.settled, self.number = np.zeros((0, n)), 0
        self.action, self.advice = np.zeros((2, n, 3), np.int64)
        inputs = actor.inputs(STATES[self.state], shape[0], shape[1])
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
        self.arrival[e] = (arrival[at : at + self.size] - arrival[at]) / self.load
        for one, new in self._own:
            one[e] = new
        self.episode[e], self.owner[e] = 0, -1
        self._advance(e, e + 1)

    def _advance(self, first: int, last: int, *, only_settle: bool = False) -> None:
        step(
            self.world, self.episode, self.goal, self.owner, self.prefix, self.settled,
            self.action, self.advice, self.seen, first, last, -1 if only_settle else self.number,
        )  # fmt: skip

    def step_async(self, actions: Any) -> None:
        """Decide everywhere."""
        self.action[:] = actions

    def step_wait(self) -> Any:
        """Go on to the next decisions; what has ended begins anew."""
        self._advance(0, self.num_envs)
        self.number += 1
        reward = self.episode["reward"].astype(np.float32)
        done = self.episode["done"] > 0
        self.discount = np.exp(self.episode["ns"] / -HORIZON_NS).astype(np.float32)
        for e in np.flatnonzero(done):
            self._restart(int(e))
        return self.seen.copy(), reward, done, self.reset_infos

    def begin(self, steps: int) -> None:
        """Forget the blocks under way: rewards are of the next so many decisions."""
        self.owner[:], self.episode["open"], self.number = -1, 0, 0
        self.settled = np.zeros((steps, self.num_envs))

    def settle(self) -> Any:
        """Rewards of all blocks since `begin`; for those under way time goes on, and back again."""
        states = [self.episode, self.owner, self.seen, *(one for one, _ in self._own)]
        before = [one.copy() for one in states]
        rule = self.world.rule
        rule["server"], rule["sampled"], rule["epsilon"] = rules.POLICY, 1, self.epsilon
        rule["random"] = self.rng.integers(1, rules.MODULUS, rule.shape)
        weights = self.weights()
        self.world.weights[: len(weights)] = weights
        self._advance(0, self.num_envs, only_settle=True)
        for one, kept in zip(states, before, strict=True):
            one[:] = kept
        return self.settled

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """One for every environment."""
        return [getattr(self, attr_name)] * self.num_envs

    def _nothing(self, *given: Any, **named: Any) -> Any:
        """Environments have no methods or wrappers of their own, and nothing is open."""

    close = set_attr = env_method = env_is_wrapped = _nothing


def _goal(problem: Routing, mode: str) -> Any:
    """The reward's factors (reconstructed)."""
    found = np.zeros(1, GOAL)
    found["base"] = problem.accuracy.mean() / POINTS
    if mode != "flow":
        alpha, beta, gamma, delta = PRESETS[mode]
        found["paper"], found["accuracy"], found["latency"] = 1, alpha / _POINTS, beta / _L0
        found["energy"], found["variance"] = gamma, delta
        return found
    price = _SCALE * NS_PER_MS / _L0  # of a ms of one request
    found["accuracy"], found["energy"] = problem.ms_per_point * price, problem.ms_per_joule * price
    found["latency"], found["limit"] = _SCALE / _L0, LIMIT
    found["penalty"] = found["latency"] * LIMIT * HORIZON_NS  # as if they stayed for a horizon
    return found


def _prefix_accuracy(problem: Routing) -> Any:
    """Percent by segment and index of the widths so far, the last one repeated (reconstructed)."""
    k, n = problem.n_segments, problem.n_widths
    found = np.zeros((k, n**k))
    for j in range(k):
        index = np.arange(n ** (j + 1))
        for _ in range(k - 1 - j):
            index = index * n + index % n
        found[j, : n ** (j + 1)] = problem.accuracy[index] / POINTS
    return found


# many worlds: arrays with an axis more, but for what all have in common

_COMMON: Final = {
    "core", "cost", "mmac", "vram", "transfer", "feasible", "ladder", "ladder_mmac", "share",
    "weights",
}  # fmt: skip
EPISODE: Final = np.dtype(
    [(name, "i8") for name in ("at", "ns", "area", "open", "done")]
    + [(name, "f8") for name in ("energy", "reward")]
)
"""Of an environment: time and integrals at its last decision, and what `step` finds.

`ns` is the time since the decision before, `open` counts blocks without a reward.
"""

GOAL: Final = np.dtype(
    [(name, "i8") for name in ("paper", "teacher", "limit")]
    + [(name, "f8") for name in ("accuracy", "base", "latency", "energy", "variance", "penalty")]
)


def _many(fresh: World, n: int) -> World:
    """So many of it."""

    def repeated(given: Any) -> Any:
        rows = zip(given._fields, given, strict=True)
        return type(given)(
            *(one if name in _COMMON else np.repeat(one[None], n, axis=0) for name, one in rows)
        )

    return repeated(fresh)._replace(core=repeated(fresh.core))  # type: ignore[no-any-return]


def _types_of_many(kind: Any) -> list[Any]:
    rows = zip(kind.instance_class._fields, kind.types, strict=True)
    return [
        one if name in _COMMON
        else types.Array(one.dtype, one.ndim + 1, "C", readonly=not one.mutable)
        for name, one in rows
    ]  # fmt: skip


CORES: Final = types.NamedTuple(_types_of_many(CORE), Core)
WORLDS: Final = types.NamedTuple([CORES, *_types_of_many(WORLD)[1:]], World)
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

    ``owner[e, block]`` is the number of the decision that made a block, or -1. A negative `number`:
    go on with the rules' own decisions until all blocks have their rewards.
    """
    goals = goal[0]
    for e in range(first, last):
        world = _one(many, e)
        own = episode[e]
        trace = world.trace[0]
        own.reward = 0.0
        asked = trace.asked == 1
        if number < 0:
            rules.decide(world)
        elif asked:
            actor.set_decision(world, action[e, 0], action[e, 1], action[e, 2])
            if goals.paper:
                owner[e, world.core.state[0].free_block] = number
                own.open += 1
            elif trace.segment == len(prefix) - 1:
                own.reward = goals.accuracy * _gain(world, prefix, goals.base)
        if goals.paper:
            status = _settle_on(world, own, goals, owner, prefix, settled, e, number < 0)
        else:
            status = advance(world)
        own.done = status != ASKED
        if asked and not goals.paper:
            _flow(world, own, goals)
        own.ns, own.at = trace.now - own.at, trace.now
        if not own.done:
            _show(world, seen, advice, e, goals.teacher)


@helper(counted=False)
def _show(world, seen, advice, e, teacher):  # type: ignore[no-untyped-def]
    """What the policy sees, the segment behind it, and what the teacher would do."""
    trace = world.trace[0]
    at, n = actor.features(world), seen.shape[1] - 1
    for j in range(n):
        seen[e, j] = world.weights[at + j]
    seen[e, n] = trace.segment
    if teacher != rules.OUTSIDE:
        rule = world.rule[0]
        rule.server = teacher
        rules.decide(world)
        rule.server = rules.OUTSIDE
        advice[e, 0], advice[e, 1], advice[e, 2] = trace.server, trace.width, actor.GROUPS - 1
        while advice[e, 2] and 1 << advice[e, 2] > trace.group:
            advice[e, 2] -= 1


@helper(counted=False)
def _gain(world, prefix, base):  # type: ignore[no-untyped-def]
    """Accuracy above the mean of all tuples, over the requests that the decision finishes."""
    trace = world.trace[0]
    fifo = world.fifo[trace.queue]
    r, found = fifo.head, 0.0
    for _ in range(min(trace.group, fifo.images)):
        request = world.request[r]
        index = request.tuple * world.core.state[0].widths + trace.width
        found += prefix[len(prefix) - 1, index] - base
        r = request.next
    return found


@helper(counted=False)
def _flow(world, own, goal):  # type: ignore[no-untyped-def]
    """Requests in the system and power, integrated since the last decision (Little's law)."""
    trace = world.trace[0]
    energy = 0.0
    for s in range(len(world.core.server)):
        energy += world.core.server[s].energy
    own.reward -= goal.latency * (trace.area - own.area) + goal.energy * (energy - own.energy)
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
        at = trace.now if trace.asked == 1 else min(trace.router_at, NEVER - 1)
        if trace.asked != 1 and trace.arrived < len(world.arrival):
            at = min(at, world.arrival[trace.arrived])
        if trace.asked != 1 and trace.pending:
            at = min(at, world.heap[0].at)
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
    """The paper's reward (7) of every block of a batch that is about to be done (reconstructed)."""
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
        block, number = core.block[b], owner[e, b]
        if number >= 0:
            r, oldest, accuracy = block.first, NEVER, 0.0
            for _ in range(block.images):
                request = world.request[r]
                index = request.tuple * core.state[0].widths + block.width
                accuracy += prefix[block.segment, index] / block.images
                oldest = min(oldest, world.arrival[r])
                r = request.next
            ns = event.at - oldest
            reward = goal.accuracy * (accuracy - goal.base)
            reward -= goal.energy * min(watts * ns * 1e-9, 100.0)
            reward -= goal.latency * min(ns, 500_000_000)
            settled[number, e] = reward - goal.variance * max(0.0, squares - load * load)
            owner[e, b] = -1
            own.open -= 1
        b = block.next
