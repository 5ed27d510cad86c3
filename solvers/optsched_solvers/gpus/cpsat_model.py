"""The CP-SAT model of a choice of GPUs: Booleans by host and count, and tables of their worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.ask import domain_numbers
from optsched.bandwidth.rates import MOST
from optsched.solving.solver import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched_solvers.gpus.vectors import CountVectors

FEW_VECTORS: Final = 1_000
"""Count vectors of which each has its value in one table; above, values are modelled."""

MOST_VECTORS: Final = 10_000
"""As many as go into one table where values cannot be modelled."""

MOST_HOSTS: Final = 8
"""Hosts of a cluster whose values are modelled."""

MOST_ROWS: Final = 60_000
"""Rows of all tables together."""

WIDEST: Final = 2**61
"""Products of demands and bandwidths are below."""


def support(vectors: CountVectors) -> Support:
    """Few count vectors, or at most eight hosts whose tables and products fit."""
    if vectors.count() <= MOST_VECTORS:
        return Support(True)
    hosts = vectors.problem.cluster.n_hosts
    if hosts > MOST_HOSTS:
        return Support(
            False,
            f"flat clusters of more than {MOST_HOSTS} hosts are too large for tables over their "
            f"counts, this one has {hosts}",
        )
    return Widths(vectors).support


class Widths:
    """Tables of patterns that the products' model needs, and whether its numbers fit."""

    def __init__(self, vectors: CountVectors) -> None:
        problem, machine = vectors.problem, vectors.tables.automaton
        network = vectors.tables.network
        sums = machine.patterns.sum(axis=1)
        k, two = vectors.request.gpus, problem.contention.sides == "two"
        self.own = np.flatnonzero((sums == k) & (network >= 0))
        """States of patterns that the choice may have."""
        self.joint = []
        """By job: states of its joint allocations, also of those not measured."""
        for j in vectors.jobs:
            held = int(problem.state.held[j].sum())
            least = min(k, held) if two else k + held
            self.joint.append(np.flatnonzero((sums >= least) & (sums <= k + held)))
        rows = len(self.own) + (1 + two) * sum(len(states) for states in self.joint)
        self.most = self._most_bandwidth(vectors)
        """No standalone bandwidth is higher."""
        demand = sum(problem.demands[j] for j in vectors.jobs)
        self.support = Support(True)
        if rows > MOST_ROWS:
            self.support = Support(
                False, f"its tables would have {rows} rows, {MOST_ROWS} are as many as it takes"
            )
        elif self.most >= MOST or 2 * self.most * (self.most + demand) >= WIDEST:
            self.support = Support(
                False, "products of bandwidths and demands would leave 64-bit integers"
            )

    def _most_bandwidth(self, vectors: CountVectors) -> int:
        network, machine = vectors.tables.network, vectors.tables.automaton
        several = self.own[machine.patterns[self.own][:, 1:].sum(axis=1) > 0]
        most = int(network[several].max(initial=0))
        inside = [row[2:][row[2:] >= 0] for row in vectors._best]
        if most >= MOST:  # then it is the hosts that limit
            most = max((int(row.max(initial=0)) for row in inside), default=0)
        k = vectors.request.gpus
        for h in vectors.hosts if k > 1 else ():
            free = int(vectors.problem.state.masks[h])
            most = max(most, vectors.tables.best(h, free, k))
        return most


class Model:
    """The CP-SAT model of one request at one level of its policy."""

    def __init__(self, vectors: CountVectors, level: int | None) -> None:
        from ortools.sat.python import cp_model

        self.model = model = cp_model.CpModel()
        self.vectors = vectors
        k = vectors.request.gpus
        self.x = [
            [model.new_bool_var(f"x{h}_{c}") for c in range(int(most) + 1)]
            for h, most in zip(vectors.hosts, vectors.room, strict=True)
        ]
        self.count = []
        for row in self.x:
            model.add_exactly_one(row)
            count = model.new_int_var(0, len(row) - 1, "")
            model.add(count == sum(c * x for c, x in enumerate(row)))
            self.count.append(count)
        model.add(sum(self.count) == k)
        self.used = [row[0].negated() for row in self.x]
        self._rules(level)
        number, widths = vectors.count(), None
        if number > FEW_VECTORS and vectors.problem.cluster.n_hosts <= MOST_HOSTS:
            widths = Widths(vectors)
        if widths is None or (number <= MOST_VECTORS and not widths.support):
            self._values(level)
        else:
            self._products(widths)
        model.minimize(-self.value)

    def _rules(self, level: int | None) -> None:
        model, vectors = self.model, self.vectors
        policy, cluster, hosts = vectors.request.policy, vectors.problem.cluster, vectors.hosts
        k = vectors.request.gpus
        if policy.balance != "free":
            least, most = model.new_int_var(1, k, "least"), model.new_int_var(1, k, "most")
            model.add(most - least <= policy.most_difference)
            for count, used in zip(self.count, self.used, strict=True):
                model.add(count <= most)
                model.add(count >= least).only_enforce_if(used)
        model.add(sum(self.used) >= policy.min_hosts)
        if policy.max_hosts is not None:
            model.add(sum(self.used) <= policy.max_hosts)
        if policy.same_type:
            self._one_group(vectors.types)
        if level is not None:
            self._one_group(domain_numbers(cluster, level)[hosts])
        for u, h in enumerate(hosts):
            if h in vectors.must:
                model.add(self.used[u] == 1)
        if not vectors.must <= set(hosts):
            model.add_bool_or([])
        if policy.slice_size is not None and policy.slice_level is not None:
            of = domain_numbers(cluster, cluster.level(policy.slice_level))[hosts]
            for domain in np.unique(of):
                slices = model.new_int_var(0, k // policy.slice_size, "")
                counts = [self.count[u] for u in np.flatnonzero(of == domain)]
                model.add(sum(counts) == policy.slice_size * slices)

    def _one_group(self, group: IntArray) -> None:
        """Only hosts of one group are used."""
        chosen = {int(g): self.model.new_bool_var("") for g in np.unique(group)}
        self.model.add_exactly_one(chosen.values())
        for used, g in zip(self.used, group.tolist(), strict=True):
            self.model.add_implication(used, chosen[g])

    def _values(self, level: int | None) -> None:
        """One table from counts to the value."""
        rows = []
        for block in self.vectors.blocks():
            value = self.vectors.shares(block).value
            kept = (value >= 0) & (self.vectors.excess(block, level) == 0)
            rows += np.column_stack([block, value])[kept].tolist()
        top = max((row[-1] for row in rows), default=0)
        self.value = self.model.new_int_var(0, top, "value")
        self.model.add_allowed_assignments([*self.count, self.value], rows)

    def _products(self, widths: Widths) -> None:
        """Tables from patterns to limits, and shares by products; all fixed by the counts."""
        model, vectors, problem = self.model, self.vectors, self.vectors.problem
        rule, most = problem.contention, widths.most
        terms = [[(x, c) for c, x in enumerate(row)] for row in self.x]
        limits = [self._pattern(terms, widths.own, most)]
        for row, best in zip(self.x, vectors._best, strict=True):
            limits.append(self._weighed(row, best[: len(row)].tolist(), most))
        own = self._cut(self._least(limits, most), most, rule.unit)
        if not vectors.jobs:
            self.value = own
            return
        across = model.new_bool_var("across")
        if rule.cross_only:
            model.add(sum(self.used) >= 2).only_enforce_if(across)
            model.add(sum(self.used) <= 1).only_enforce_if(across.negated())
        else:
            model.add(across == 1)
        ceiling = most + sum(problem.demands[j] for j in vectors.jobs)
        total: Any = own
        shares = []
        for j, states in zip(vectors.jobs, widths.joint, strict=True):
            touched = self._touched(j, across)
            total = total + problem.demands[j] * touched
            joint = self._joint(j, states, most)
            model.add(joint >= 0).only_enforce_if(touched)  # -1: not measured
            share, cut = model.new_int_var(0, ceiling, ""), self._cut(joint, most, rule.unit)
            model.add(share == cut).only_enforce_if(touched)
            model.add(share == ceiling).only_enforce_if(touched.negated())
            shares.append(share)
        capacity = self._least(shares, ceiling)
        asked, fits = model.new_int_var(1, ceiling + 1, "D"), model.new_bool_var("fits")
        model.add(total <= capacity).only_enforce_if(fits)
        model.add(total >= capacity + 1).only_enforce_if(fits.negated())
        model.add(asked == total).only_enforce_if(fits.negated())
        model.add(asked == 1).only_enforce_if(fits)  # the quotient is not used then
        product = model.new_int_var(0, most * ceiling, "")
        quotient = model.new_int_var(0, most * ceiling, "")
        model.add_multiplication_equality(product, [own, capacity])
        model.add_division_equality(quotient, product, asked)
        self.value = model.new_int_var(0, most, "value")
        model.add(self.value == own).only_enforce_if(fits)
        model.add(self.value == quotient).only_enforce_if(fits.negated())

    def _touched(self, j: int, across: Any) -> Any:
        """Whether a job interferes."""
        held = self.vectors.problem.state.held[j]
        there = [self.used[u] for u, h in enumerate(self.vectors.hosts) if held[h]]
        touched, meets = self.model.new_bool_var(""), self.model.new_bool_var("")
        self.model.add_max_equality(meets, [*there, 0])
        self.model.add_bool_and([meets, across]).only_enforce_if(touched)
        self.model.add_bool_or([meets.negated(), across.negated(), touched])
        return touched

    def _joint(self, j: int, states: IntArray, most: int) -> Any:
        """Least bandwidth of the joint allocations with a job, a variable; -1: not measured."""
        vectors, held = self.vectors, self.vectors.problem.state.held[j].tolist()
        limits = []
        for side in ("s", "j") if vectors.problem.contention.sides == "two" else ("both",):
            terms: list[list[tuple[Any, int]]] = []
            for h, theirs in enumerate(held):
                base = theirs if side != "s" else 0
                if h not in vectors.hosts:
                    terms.append([(1, base)])
                    continue
                row = self.x[vectors.hosts.index(h)]
                more = theirs if side != "j" or theirs else -len(row)
                terms.append([(x, max(0, c + more) if c else base) for c, x in enumerate(row)])
            limits.append(self._pattern(terms, states, most))
            for h, term in enumerate(terms):
                rates = [int(vectors._joint[h][size]) for _, size in term]
                limits.append(self._weighed([x for x, _ in term], rates, most))
        return self._least(limits, most)

    def _weighed(self, row: list[Any], rates: list[int], most: int) -> Any:
        """The rate of the Boolean of a row that is true."""
        rate = self.model.new_int_var(0, most, "")
        self.model.add(rate == sum(min(r, most) * x for r, x in zip(rates, row, strict=True)))
        return rate

    def _least(self, rates: list[Any], most: int) -> Any:
        least = self.model.new_int_var(-1, most, "")
        self.model.add_min_equality(least, rates)
        return least

    def _cut(self, rate: Any, most: int, unit: int) -> Any:
        """A rate cut to a multiple of the unit; what is not measured becomes 0."""
        known, whole = self.model.new_int_var(0, most, ""), self.model.new_int_var(0, most, "")
        self.model.add_max_equality(known, [rate, 0])
        if unit == 1:
            return known
        self.model.add_division_equality(whole, known, unit)
        return unit * whole

    def _pattern(self, terms: list[list[tuple[Any, int]]], states: IntArray, most: int) -> Any:
        """The network's limit, a variable, by how many hosts have how many GPUs.

        A term holds a host's Booleans, and the number of GPUs that each of them means.
        """
        tables = self.vectors.tables
        patterns = tables.automaton.patterns[states]
        top = int(patterns.max(initial=1))
        those: list[list[Any]] = [[] for _ in range(top + 1)]
        for x, size in (pair for term in terms for pair in term):
            if size <= top:
                those[size].append(x)
            else:
                self.model.add(x == 0)
        hosts = []
        for size in range(1, top + 1):
            number = self.model.new_int_var(0, len(terms), "")
            self.model.add(number == sum(those[size]))
            hosts.append(number)
        limit = self.model.new_int_var(-1, most, "")
        used = np.stack([(patterns == size).sum(axis=1) for size in range(1, top + 1)], axis=1)
        rows = np.column_stack([used, np.minimum(tables.network[states], most)]).tolist()
        self.model.add_allowed_assignments([*hosts, limit], rows)
        return limit

    def hint(self, chosen: Sequence[int]) -> None:
        """Begin with the counts of these GPUs."""
        cluster = self.vectors.problem.cluster
        counts = np.bincount(cluster.host_of[list(chosen)], minlength=cluster.n_hosts)
        for u, h in enumerate(self.vectors.hosts):
            if counts[h] < len(self.x[u]):
                self.model.add_hint(self.count[u], int(counts[h]))
