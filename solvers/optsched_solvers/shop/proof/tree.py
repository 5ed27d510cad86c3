"""One graph under tree search: targets, slices, leaves; the Python side of `tree_search`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder
from optsched.kernels import longest_path
from optsched.model import bounds
from optsched.model.schedule import Csr
from optsched_solvers.shop.proof import tree_search
from optsched_solvers.shop.proof.state import TRUE, latest_starts, root_orders, state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray, Schedule
    from optsched_solvers.shop.proof.state import SmallArray

REFUTED: Final = "refuted"
STOPPED: Final = "stopped"
SHAVED: Final = "shaved"

SHAVING_GAIN: Final = 0.05
MOST_PAIRS: Final = 20
"""Open pairs for every operation; with more of them it takes too long to try them all."""
MOST_ROOTS: Final = 4

SLICE: Final = 0.008
"""Seconds that a kernel call should take."""

FIRST_RESTART: Final = 100
RESTART_GROWTH: Final = 1.15
MOST_NOGOOD_LITERALS: Final = 1 << 22


class Root(NamedTuple):
    """What propagation and shaving know of all schedules that end by a target."""

    target: int
    earliest: IntArray
    latest: IntArray
    value: SmallArray
    open: IntArray
    place: IntArray
    n_open: IntArray
    slot_open: IntArray
    pairs: int


class DisjunctiveTree:
    """Proves or refutes "some schedule ends by the target" (at most `MOST_LITERALS` ordered pairs).

    `stop` is called between slices; a true result ends the call with `STOPPED`. `on_leaf` is called
    with orders and makespan of every schedule found that meets the target; the search then goes on
    below that makespan.
    """

    def __init__(
        self,
        graph: Schedule,
        stop: Callable[[], bool] | None = None,
        on_leaf: Callable[[Csr, int], None] | None = None,
    ) -> None:
        self.graph = graph
        self.stop = stop or (lambda: False)
        self.on_leaf = on_leaf or (lambda sequences, makespan: None)
        self.state = state_of(graph)
        self._search = self.state.search[0]
        self.horizon = bounds.horizon(graph)
        self.shaved = False
        self._per_slice = 16
        self._restart_after = float(FIRST_RESTART)
        self._nogoods_for = self.horizon
        self._started = False
        self._last_size = (0.0, 0.0)
        op, search = self.state.op, self._search
        op["lst"][:-1] = latest_starts(graph, self.horizon)
        search["target"] = search["root_target"] = self.horizon
        self.possible = (
            bool((op["est"] <= op["lst"]).all())
            and all(
                self._run(tree_search.DECIDE, m) == tree_search.DONE
                for m in root_orders(graph, self.state.machine).tolist()
            )
            and self._run(tree_search.PROPAGATE) == tree_search.DONE
        )
        self._roots = [self._root()]  # targets fall; the first holds for every schedule

    @property
    def nodes(self) -> int:
        """Branches and probes propagated so far."""
        return int(self._search["nodes"])

    @property
    def target(self) -> int:
        """Makespan to be met."""
        return int(self._search["target"])

    def lower(self, target: int) -> None:
        """Lower the target, without forgetting anything."""
        self._search["target"] = min(target, self.target)

    def reset(self, target: int) -> bool:
        """Back to a root, with this target; False if propagation refutes it.

        Begins with what `keep_root` kept for the nearest target that is not lower. Ratings stay;
        nogoods stay if the target is not above the one they were found with.
        """
        state, search = self.state, self._search
        nearest = (root for root in reversed(self._roots) if root.target >= target)
        base = next(nearest, self._roots[0])
        state.op["est"], state.op["lst"] = base.earliest, base.latest
        state.value[:], state.machine["open"] = base.value, base.n_open
        state.slot["open"] = base.slot_open
        state.open[:], state.literal["place"] = base.open, base.place
        for key in ("trail", "level", "entries", "cursor", "probe", "step", "failed"):
            search[key] = 0
        search["pairs"] = base.pairs
        search["cursor_end"] = 2 * self.graph.n_operations
        search["target"] = search["root_target"] = target
        if target > self._nogoods_for:
            self._drop_nogoods()
        self._nogoods_for = target
        self._restart_after = float(FIRST_RESTART)
        self._started = self.shaved = False
        good = self.possible and self._run(tree_search.PROPAGATE) == tree_search.DONE
        if good:
            self._last_size = self._size()
        return good

    def keep_root(self) -> bool:
        """Remember what is known at the root, for this and all lower targets; ends the search.

        False if that refutes the target.
        """
        if not self._restart():
            return False
        first, *later = self._roots
        if self.target < first.target:
            above = [root for root in later if root.target > self.target]
            self._roots = [first, *above[-MOST_ROOTS:], self._root()]
        return True

    def _root(self) -> Root:
        state = self.state
        return Root(
            self.target, state.op["est"].copy(), state.op["lst"].copy(), state.value.copy(),
            state.open.copy(), state.literal["place"].copy(),
            state.machine["open"].copy(), state.slot["open"].copy(),
            int(self._search["pairs"]),
        )  # fmt: skip

    def shave(self, until: int | None = None, gain: float = SHAVING_GAIN) -> str:
        """Try starts and orders at the root; return `SHAVED`, `REFUTED` or `STOPPED`.

        Rounds over all earliest and latest starts come first, they are stronger and fewer; when
        they bring no more, all open pairs are tried, which also makes their first ratings. Stops
        when `nodes` is `until`. `gain` is the least reduction of the search space (share of the sum
        of the logarithms of all windows, or of the open pairs) that makes another round worth it.
        """
        while not (self.shaved or self._started):  # a search has left the root
            answer = self._sliced(tree_search.SHAVE, until)
            if answer == tree_search.REFUTED:
                return REFUTED
            if answer == tree_search.DONE:
                self._next_round(gain)
            elif answer == tree_search.FULL:
                self._grow()
            if self.stop() or (until is not None and self.nodes >= until):
                return SHAVED if self.shaved else STOPPED
        return SHAVED

    def _next_round(self, gain: float) -> None:
        """Starts again if the last round brought enough, else pairs, if not tried just now."""
        search, n = self._search, self.graph.n_operations
        before, self._last_size = self._last_size, self._size()
        gained = any(
            new < (1 - gain) * old for new, old in zip(self._last_size, before, strict=True)
        )
        starts_were_tried = search["cursor_end"] == 2 * n
        if gained:
            search["cursor"], search["cursor_end"] = 0, 2 * n
        elif starts_were_tried and 0 < search["pairs"] <= MOST_PAIRS * n:
            search["cursor_end"] += len(self.state.value)
        else:
            self.shaved = True

    def _size(self) -> tuple[float, float]:
        op = self.state.op
        wide = np.log2(1.0 + op["lst"] - op["est"]).sum()
        return float(wide), float(self._search["pairs"])

    def search(self, until: int | None = None) -> str:
        """Search below the target: `REFUTED` when nothing (more) is there, or `STOPPED`."""
        search = self._search
        task = tree_search.SEARCH
        if not self._started:
            self._started = True
            search["restart_at"] = search["failures"] + int(self._restart_after)
        while True:
            answer = self._sliced(task, until)
            task = tree_search.SEARCH
            if answer == tree_search.REFUTED:
                return REFUTED
            if answer == tree_search.LEAF:
                self._leaf()
                task = tree_search.SEARCH_ON
            elif answer == tree_search.FULL:
                self._grow()
            elif answer == tree_search.RESTART_DUE and not self._restart():
                return REFUTED
            if self.stop() or (until is not None and self.nodes >= until):
                if task == tree_search.SEARCH_ON and self._run(task) == tree_search.REFUTED:
                    return REFUTED
                return STOPPED

    def _leaf(self) -> None:
        """Everything is decided: judge it by its true makespan."""
        sequences = self._orders()
        if not _bytes_fit(self.graph, sequences):
            return
        try:
            found = longest_path.evaluate(self.graph, sequences)
        except CyclicOrder:  # of zero length: windows do not see it
            return
        if (found.heads + self.graph.duration > self.graph.deadline).any():
            return
        if found.makespan <= self.target:
            self.on_leaf(sequences, found.makespan)
            self.lower(found.makespan - 1)

    def _orders(self) -> Csr:
        rows = []
        for r in range(self.graph.n_resources):
            n, at = self.state.machine[["size", "matrix"]][r]
            before = (self.state.value[at : at + n * n].reshape(n, n) == TRUE).sum(axis=0)
            rows.append(self.graph.users[r][np.argsort(before, kind="stable")])
        return Csr(self.graph.users.indptr, np.concatenate(rows) if rows else [])

    def _restart(self) -> bool:
        search = self._search
        entries = int(search["entries"])
        self._reserve_nogoods(entries, entries * (entries + 1) // 2)
        answer = self._run(tree_search.RESTART)
        self._restart_after *= RESTART_GROWTH
        search["restart_at"] = search["failures"] + int(self._restart_after)
        return bool(answer != tree_search.REFUTED)

    def _reserve_nogoods(self, nogoods: int, literals: int) -> None:
        state, search = self.state, self._search
        if search["nogood_literals"] + literals > MOST_NOGOOD_LITERALS:
            self._drop_nogoods()
        most = int(search["nogoods"]) + nogoods
        if most + 1 >= len(state.nogood_ptr):
            self.state = state = state._replace(
                nogood_ptr=_longer(state.nogood_ptr, 2 * most + 2),
                next_watch=_longer(state.next_watch, 4 * most + 4),
            )
        if search["nogood_literals"] + literals > len(state.nogood):
            self.state = state._replace(
                nogood=_longer(state.nogood, 2 * int(search["nogood_literals"] + literals))
            )

    def _drop_nogoods(self) -> None:
        self._search["nogoods"] = self._search["nogood_literals"] = 0
        self.state.literal["watched"] = -1

    def _grow(self) -> None:
        state = self.state
        if self._search["entries"] + 1 >= len(state.entry):
            self.state = state._replace(entry=_longer(state.entry, 2 * len(state.entry)))
        else:
            size = 2 * len(state.trail) + len(state.value)
            self.state = state._replace(trail=_longer(state.trail, size))

    def _run(self, task: int, until: int = 0) -> int:
        return int(tree_search.run(self.state, task, until))

    def _sliced(self, task: int, until: int | None) -> int:
        """One kernel call of about `SLICE` seconds; what it does depends on nodes alone."""
        before = self.nodes
        end = before + self._per_slice
        began = time.perf_counter()
        answer = self._run(task, end if until is None else min(end, until))
        spent = time.perf_counter() - began
        done = self.nodes - before
        if answer == tree_search.SLICE_OVER and done == self._per_slice:
            factor = min(2.0, max(0.25, SLICE / max(spent, 1e-9)))
            self._per_slice = max(1, int(done * factor))
        return answer


def _longer(array: Any, size: int) -> Any:
    longer = np.zeros(size, array.dtype)
    longer[: len(array)] = array
    return longer


def _bytes_fit(graph: Schedule, sequences: Csr) -> bool:
    """Whether held memory stays within 0 and the limit along every sequence."""
    ids = sequences.ids
    change = (graph.acquire - graph.free)[ids]
    total = np.concatenate([[0], np.cumsum(change)])
    begin = np.repeat(total[sequences.indptr[:-1]], np.diff(sequences.indptr))
    if (total[1:] < begin).any():
        return False
    limit = np.repeat(graph.memory, np.diff(sequences.indptr))
    need = total[:-1] - begin + (graph.acquire + graph.workspace)[ids]
    return not bool(((limit > 0) & (need > limit)).any())
