"""PPO by hand: episodes that are replayed, the loss and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.serving.routers import Decision


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


def loss_and_gradients(kept: dict[str, Any], epsilon: float) -> tuple[float, dict[str, Any]]:
    """Of one batch; `kept` has the batch and the parameters by name.

    Two layers of tanh for the actor, two for the critic; clip .2, value .5, entropy .05.
    """
    seen, action = kept["observations"], kept["actions"].astype(int)
    n = len(seen)
    names = [
        [*(f"mlp_extractor.{net}_net.{i}" for i in (0, 2)), head]
        for net, head in (("policy", "action_net"), ("value", "value_net"))
    ]
    gradients: dict[str, Any] = {}

    def forward(layers: list[str]) -> list[Any]:
        found = [seen]
        for i, name in enumerate(layers):
            z = found[-1] @ kept[f"{name}.weight"].T + kept[f"{name}.bias"]
            found.append(np.tanh(z) if i < 2 else z)
        return found

    def backward(layers: list[str], values: list[Any], slope: Any) -> None:
        for i in (2, 1, 0):
            gradients[f"{layers[i]}.weight"] = slope.T @ values[i]
            gradients[f"{layers[i]}.bias"] = slope.sum(0)
            slope = slope @ kept[f"{layers[i]}.weight"] * (1 - values[i] ** 2)

    hidden, critic = map(forward, names)
    likely, entropy = np.zeros(n), np.zeros(n)
    by_likely, by_entropy = [], []
    for i, z in enumerate(np.split(hidden[-1], [3, 7], axis=1)):
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        share = 1 - epsilon if i == 0 else 1.0
        m = share * p + (1 - share) / p.shape[1]
        chosen = np.eye(m.shape[1])[action[:, i]]
        likely += (np.log(m) * chosen).sum(1)
        entropy -= (m * np.log(m)).sum(1)
        for found, by_m in ((by_likely, chosen / m), (by_entropy, -np.log(m) - 1)):
            found.append(share * p * (by_m - (p * by_m).sum(1, keepdims=True)))
    ratio = np.exp(likely - kept["log_probs"].ravel())
    advantage = kept["advantages"].ravel()
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped = np.clip(ratio, 0.8, 1.2) * advantage
    error = critic[-1].ravel() - kept["returns"].ravel()
    loss = -np.minimum(ratio * advantage, clipped).mean() + 0.5 * (error**2).mean()
    slope = np.where(ratio * advantage <= clipped, -advantage * ratio, 0.0)[:, None] / n
    slopes = [slope * a - 0.05 / n * b for a, b in zip(by_likely, by_entropy, strict=True)]
    backward(names[0], hidden, np.concatenate(slopes, axis=1))
    backward(names[1], critic, error[:, None] / n)
    return float(loss - 0.05 * entropy.mean()), gradients
