"""Policies for tests: simple ones, one that does everything a policy may do, and bad ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from optsched.cluster import ClusterView, Decision


class Greedy:
    """Running jobs stay; pending ones start at their smallest size while GPUs last."""

    name = "greedy"
    clairvoyant = False

    def decide(self, view: ClusterView) -> Decision:
        """By position."""
        free, units = int(view.free.sum()), int(view.zero_free.sum())
        quota = np.where(view.running & (view.gpus == 0), -1, view.gpus)
        for i in np.flatnonzero(~view.running):
            sizes = view.size[view.size_ptr[i] : view.size_ptr[i + 1]]
            if len(sizes) and sizes[0] <= free:
                quota[i] = sizes[0]
                free -= int(sizes[0])
            elif not len(sizes) and units:
                quota[i] = -1
                units -= 1
        return Decision(quota)


class Anything(Greedy):
    """Every legal thing at random (by time and seed), until `calm`; then greedy."""

    name = "anything"

    def __init__(self, seed: int, calm: int = 60, wild: bool = True, table: Any = None) -> None:
        self.seed, self.calm, self.wild, self.table = seed, calm, wild, table

    def decide(self, view: ClusterView) -> Decision:
        """A pure function of the view."""
        if view.time >= self.calm:
            return super().decide(view)
        dice = random.Random(f"{self.seed} {view.time} {view.job.tolist()} {view.done.tolist()}")
        n = len(view.job)
        fixed = view.settings.resize == "pass"
        quota = np.zeros(n, np.int64)
        nodes: dict[int, Any] = {}
        share: dict[int, int] = {}
        for i in range(n):
            sizes = view.size[view.size_ptr[i] : view.size_ptr[i + 1]].tolist()
            now = -1 if view.running[i] and not view.gpus[i] else int(view.gpus[i])
            choices = [0, *(sizes or [-1])]
            if view.running[i] and fixed and not view.at_pass_end[i]:
                choices = [0, now]
            quota[i] = now if not view.preemptible[i] and now else dice.choice([now, *choices])
            moves = quota[i] > 0 and view.preemptible[i]
            moves = moves and (not fixed or not view.running[i] or bool(view.at_pass_end[i]))
            if self.wild and moves and dice.random() < 0.3:
                nodes[i] = self.split(dice, int(quota[i]), len(view.free))
            elif self.wild and moves and dice.random() < 0.3 and n > 1:
                share[i] = dice.choice([k for k in range(n) if k != i])
        order = np.array(dice.sample(range(n), n))
        wake = view.time + dice.randint(1, 9) if dice.random() < 0.3 else self.calm
        return Decision(quota, nodes, wake, order, best_effort=True, share=share)

    def split(self, dice: random.Random, gpus: int, nodes: int) -> dict[int, int]:
        """So many GPUs on some nodes."""
        found: dict[int, int] = {}
        for _ in range(gpus):
            n = dice.randrange(nodes) if dice.random() < 0.4 or not found else max(found)
            found[n] = found.get(n, 0) + 1
        return found
