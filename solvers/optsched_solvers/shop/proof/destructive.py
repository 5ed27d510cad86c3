"""Destructive lower bounds: a makespan that is refuted raises the bound above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched_solvers.shop.proof.tree import REFUTED, STOPPED, DisjunctiveTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import Csr

FIRST_STEP: Final = 8
"""The first step is such a part of the gap."""

FIRST_TRIAL: Final = 2000
"""Nodes of the tree when shaving alone no longer helps; doubled when the smallest step fails."""


class Climb:
    """Raises a bound by trial: steps grow while targets are refuted, shrink when they are not.

    First bisection by propagation alone, then trials of the tree. A trial that does not end is
    worth nothing in itself, but its ratings and nogoods serve the next one, below. The climb ends
    at the makespan `upper`; the tree is used by this climb alone. `on_bound` is called with every
    bound, `on_schedule` with orders and makespan of schedules found.
    """

    def __init__(
        self,
        tree: DisjunctiveTree,
        lower: int,
        upper: int,
        *,
        on_bound: Callable[[int], None] | None = None,
        on_schedule: Callable[[Csr, int], None] | None = None,
    ) -> None:
        self.tree, self.lower, self.upper = tree, lower, upper
        self.on_bound = on_bound or (lambda value: None)
        self.on_schedule = on_schedule or (lambda sequences, makespan: None)
        self._step, self._trial = 0, 0  # step 0: not begun
        self._left = -1  # nodes of the tree that the trial under way still has; -1: none is
        tree.on_leaf = self._found
        self._stop = tree.stop
        self._target = lower
        tree.stop = lambda: self._stop() or not self._pointed  # others may have moved the limits

    @property
    def done(self) -> bool:
        """Whether bound and upper limit have met."""
        return self.lower >= self.upper

    def work(self, nodes: int | None = None) -> bool:
        """Go on for so many nodes; true when `done`, false when stopped or out of nodes."""
        tree = self.tree
        end = None if nodes is None else tree.nodes + nodes
        if not self._step:
            self._bisect()
            self._step = max(1, (self.upper - self.lower) // FIRST_STEP)
        while not self.done:
            if end is not None and tree.nodes >= end:
                return False
            if self._left < 0 or not self._pointed:
                self._target = min(self.lower + self._step, self.upper) - 1
                self._left = self._trial
                answer = STOPPED if tree.reset(self._target) else REFUTED
            elif not tree.shaved:
                answer = tree.shave(end)
            elif self._left:
                before = tree.nodes
                until = before + self._left
                answer = tree.search(until if end is None else min(until, end))
                self._left = max(0, self._left - (tree.nodes - before))
            else:
                self._give_up()
                continue
            if answer == REFUTED:
                self._refuted()
            elif answer == STOPPED and self._pointed and self._stop():
                return False
        return True

    @property
    def _pointed(self) -> bool:
        """Whether to refute the target under way would still raise the bound."""
        return self.lower <= self._target < self.upper

    def _refuted(self) -> None:
        """Nothing ends by the target that the tree has now (a schedule found lowers it)."""
        self._raise(self.tree.target + 1)
        self._left = -1
        self._step *= 2

    def _give_up(self) -> None:
        if not self.tree.keep_root():
            self._refuted()
            return
        self._left = -1
        if self._step == 1:
            self._trial = max(FIRST_TRIAL, 2 * self._trial)
        else:
            self._step = max(1, self._step // 4)

    def _raise(self, value: int) -> None:
        if value > self.lower:
            self.lower = min(value, self.upper)
            self.on_bound(self.lower)

    def _found(self, sequences: Csr, makespan: int) -> None:
        self.upper = min(self.upper, makespan)
        self._target = min(self._target, makespan - 1)  # the tree goes on below it
        self.on_schedule(sequences, makespan)

    def _bisect(self) -> None:
        low, high = self.lower, self.upper  # invariant: nothing below low
        while low < high and not self._stop():
            middle = (low + high) // 2
            if self.tree.reset(middle):
                high = middle
            else:
                low = middle + 1
        self._raise(low)
