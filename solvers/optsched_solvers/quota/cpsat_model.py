"""Quota plans as CP-SAT models: options, types, nodes, localities, and what decides ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.problems.quota.data import Quotas

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray
    from optsched.problems.quota.problem import QuotaPlan


class Model:
    """Variables of one plan.

    Parameters
    ----------
    plan
        Feasible by counting.
    joint
        Whether nodes are decided too (`y`): needed for localities and for exact ties.
    """

    def __init__(self, plan: QuotaPlan, joint: bool) -> None:
        from ortools.sat.python import cp_model

        self.plan, self.joint = plan, joint
        self.model = model = cp_model.CpModel()
        table = plan.table
        self.pick = [model.new_bool_var("") for _ in range(len(table.size))]
        self.y: dict[tuple[int, int], Any] = {}
        self.z: dict[tuple[int, int], Any] = {}
        ptr = table.ptr.tolist()
        self.size, self.kind = table.size.tolist(), table.kind.tolist()
        self.rows = [range(ptr[j], ptr[j + 1]) for j in range(len(plan.jobs))]
        cost = table.cost.tolist()
        for row in self.rows:
            model.add_exactly_one([self.pick[o] for o in row])
        for k, budget in enumerate(plan.budgets):
            some = [o for o in range(len(self.size)) if self.kind[o] == k and self.size[o]]
            used = sum(self.size[o] * self.pick[o] for o in some)
            if some and plan.hands_out_all:
                model.add(used == plan.total)
            elif some:
                model.add(used <= budget)
        if plan.highest:
            low, high = min(cost, default=0), max(cost, default=0)
            self.goal: Any = model.new_int_var(low, high, "level")
            for row in self.rows:
                model.add(sum(cost[o] * self.pick[o] for o in row) <= self.goal)
        else:
            self.goal = sum(cost[o] * self.pick[o] for o in range(len(cost)) if cost[o])
        if joint:
            self._nodes()
        bound = plan.lower_bound()
        if not isinstance(self.goal, int):
            model.add(self.goal >= bound)
            model.minimize(self.goal)

    def _nodes(self) -> None:
        """GPUs of every node for every job, and the localities."""
        model, plan = self.model, self.plan
        kind, gpus, _ = (part.tolist() for part in plan.pools)
        for j, row in enumerate(self.rows):
            for k in range(len(plan.kinds)):
                some = [o for o in row if self.kind[o] == k and self.size[o]]
                nodes = [n for n in range(len(gpus)) if kind[n] == k and gpus[n]]
                most = max((self.size[o] for o in some), default=0)
                if not most:
                    continue
                for n in nodes:
                    self.y[j, n] = model.new_int_var(0, min(gpus[n], most), "")
                    self.z[j, n] = model.new_bool_var("")
                    model.add(self.y[j, n] <= gpus[n] * self.z[j, n])
                    model.add(self.y[j, n] >= self.z[j, n])
                wanted = sum(self.size[o] * self.pick[o] for o in some)
                model.add(sum(self.y[j, n] for n in nodes) == wanted)
                self._locality(j, some, nodes, gpus)
        for n, room in enumerate(gpus):
            here = [self.y[j, n] for j in range(len(plan.jobs)) if (j, n) in self.y]
            if here:
                model.add(sum(here) <= room)

    def _locality(self, j: int, some: list[int], nodes: list[int], gpus: list[int]) -> None:
        model, rule = self.model, self.plan.jobs[j].locality
        largest = max((gpus[n] for n in nodes), default=0)
        if rule == "single":
            fits = [self.pick[o] for o in some if self.size[o] <= largest]
            if fits:
                spread = len(nodes) * (1 - sum(fits))
                model.add(sum(self.z[j, n] for n in nodes) <= 1 + spread)
        elif rule == "whole":
            parts = []
            for n in nodes:
                part, whole = model.new_bool_var(""), model.new_bool_var("")
                model.add(self.y[j, n] >= gpus[n] * whole)
                model.add(self.z[j, n] <= part + whole)
                parts.append(part)
            model.add_at_most_one(parts)

    def break_ties(self, value: int) -> None:
        """Keep the objective, and minimise nodes spanned, then moves, then GPUs left in parts."""
        model, plan = self.model, self.plan
        model.clear_objective()
        if not isinstance(self.goal, int):
            model.add(self.goal <= value)
        scale = plan.n_gpus + 1
        spanned = sum(self.z.values())
        model.minimize((spanned * scale + self._moved()) * scale + self._fragments())

    def _moved(self) -> Any:
        plan, model = self.plan, self.model
        held_now = plan.held
        ptr, node, count = (part.tolist() for part in (held_now.ptr, held_now.node, held_now.count))
        moved: Any = 0
        for j, row in enumerate(self.rows):
            some = range(ptr[j], ptr[j + 1])
            held = sum(count[i] for i in some)
            if not held:
                continue
            least = sum(min(held, self.size[o]) * self.pick[o] for o in row)
            moved += least
            for i in some:
                if (j, node[i]) in self.y:
                    kept = model.new_int_var(0, count[i], "")
                    model.add(kept <= self.y[j, node[i]])
                    moved -= kept
        return moved

    def _fragments(self) -> Any:
        model = self.model
        _, gpus, _ = (part.tolist() for part in self.plan.pools)
        total: Any = 0
        for n, room in enumerate(gpus):
            jobs = [j for j in range(len(self.rows)) if (j, n) in self.y]
            if not jobs or room < 2:
                continue
            busy, left = model.new_bool_var(""), model.new_int_var(0, room - 1, "")
            model.add_max_equality(busy, [self.z[j, n] for j in jobs])
            model.add(left >= room * busy - sum(self.y[j, n] for j in jobs))
            total += left
        return total

    def hint(self, quotas: Quotas) -> None:
        """Begin the search at an answer."""
        sizes, kinds = (part.tolist() for part in self.plan.sizes(quotas))
        for j, row in enumerate(self.rows):
            for o in row:
                here = self.size[o] == sizes[j] and (not sizes[j] or self.kind[o] == kinds[j])
                self.model.add_hint(self.pick[o], here)
        columns = (part.tolist() for part in (quotas.rows, quotas.node, quotas.count))
        on = {(j, n): c for j, n, c in zip(*columns, strict=True)}
        for at, variable in self.y.items():
            self.model.add_hint(variable, on.get(at, 0))

    def quotas(self, value: Callable[[Any], int]) -> tuple[IntArray, IntArray]:
        """Sizes and types of a solution."""
        sizes, kinds = np.zeros(len(self.rows), np.int64), np.zeros(len(self.rows), np.int64)
        for j, row in enumerate(self.rows):
            o = next(o for o in row if value(self.pick[o]))
            sizes[j], kinds[j] = self.size[o], self.kind[o]
        return sizes, kinds

    def placement(self, value: Callable[[Any], int]) -> Quotas:
        """GPUs by node of a solution."""
        found = [(j, n, value(variable)) for (j, n), variable in self.y.items()]
        used = np.array([row for row in found if row[2]], np.int64).reshape(-1, 3)
        return Quotas.of(len(self.rows), *used.T)
