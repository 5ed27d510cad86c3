"""Permutations with repetition as schedules: encoding, and decoding a population at a time.

A gene names a *chain* of operations; its n-th occurrence stands for the chain's n-th operation
(Bierwirth 1995, "A generalized permutation approach to job shop scheduling with genetic
algorithms"). In a job shop chains are the jobs. In other graphs a job may branch, so it is cut into
as few chains as one sweep finds; every order that the arcs allow is then some chromosome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from optsched.kernels import longest_path
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.model.graph import evaluate
from optsched.model.schedule import Rows
from optsched_solvers.shop.list_schedule import NO_LIMIT, DispatchGraph, _safe
from optsched_solvers.shop.list_schedule import run as list_schedule

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

STUCK: Final = 2**62
"""Value of a chromosome whose operations cannot all be placed."""

GUIDED_UP_TO: Final = 64
"""Chains; above, the list scheduler, which looks at one resource at a time, is quicker."""

Population = npt.NDArray[np.int64]
"""Chromosomes as rows, shape (individuals, n_operations), C order."""


class Encoding(NamedTuple):
    """Which operation the n-th occurrence of a gene stands for, and what decoding reads.

    Columns named ``chain_*`` have one value per operation in the order of `operation`, which lists
    chain after chain; `arrays` has them by operation id.
    """

    indptr: IntArray  # per gene: its chain is operation[indptr[g]:indptr[g + 1]]
    operation: IntArray
    gene: IntArray  # per operation id
    chain_duration: IntArray
    chain_resource: IntArray  # operations without resource have one of their own
    chain_weight: IntArray  # start to start, to the next of the chain
    chain_release: IntArray
    plain: bool  # chains alone tell when an operation may start: no setups, bytes, other arcs
    arrays: DispatchGraph

    @property
    def columns(self) -> tuple[IntArray, ...]:
        """What decoding of chains alone reads."""
        return (
            self.indptr, self.chain_duration, self.chain_resource, self.chain_weight,
            self.chain_release,
        )  # fmt: skip

    @property
    def lanes(self) -> tuple[int, int]:
        """Number of resources, and with those that stand for none."""
        return len(self.arrays.memory), int(self.chain_resource.max(initial=-1)) + 1

    @property
    def n_genes(self) -> int:
        """Number of chains: genes are 0..n_genes-1."""
        return len(self.indptr) - 1

    @classmethod
    def of(cls, graph: Schedule) -> Encoding:
        """The encoding of a graph whose operations hold at most one resource each."""
        chains, follows = _chains(graph)
        indptr = np.zeros(len(chains) + 1, np.int64)
        np.cumsum([len(chain) for chain in chains], out=indptr[1:])
        operation = np.array([i for chain in chains for i in chain], np.int64)
        n = graph.n_operations
        gene = np.empty(n, np.int64)
        gene[operation] = np.repeat(np.arange(len(chains)), np.diff(indptr))
        resource = graph.single_resource.copy()
        loose = np.flatnonzero(resource < 0)
        resource[loose] = graph.n_resources + np.arange(len(loose))
        plain = len(graph.arcs.tail) == n - len(chains) and not graph.has_setups
        plain = plain and not _bytes_matter(graph, operation, gene)
        return cls(
            indptr, operation, gene, graph.duration[operation], resource[operation],
            follows[operation], graph.release[operation], plain, DispatchGraph.of(graph),
        )  # fmt: skip

    def encode(self, graph: Schedule, sequences: Rows) -> IntArray:
        """The chromosome of feasible orders: decoded, it gives these orders again.

        Raises `CyclicOrder` or `InputError` like `optsched.model.graph.evaluate`.
        """
        heads = longest_path.evaluate(graph, sequences).heads
        place = np.arange(graph.n_operations)
        if not ((graph.duration > 0).all() and (graph.successors.weight > 0).all()):
            # of operations that start together some must still go first
            place[evaluate(graph, sequences).order] = np.arange(graph.n_operations)
        return self.gene[np.lexsort((place, heads))]

    def operations(self, chromosome: IntArray) -> IntArray:
        """Operation ids gene by gene."""
        operations = np.empty(len(chromosome), np.int64)
        operations[np.argsort(chromosome, kind="stable")] = self.operation
        return operations

    def sequences(self, graph: Schedule, chromosome: IntArray) -> Rows:
        """The order on every resource, of a chromosome that has been decoded (so is in order)."""
        operations = self.operations(chromosome)
        resource = graph.single_resource[operations]
        used = operations[resource >= 0]
        return Rows(graph.users.indptr, used[np.argsort(resource[resource >= 0], kind="stable")])


def decode(
    encoding: Encoding,
    population: Population,
    *,
    active: bool = False,
    out: IntArray | None = None,
) -> IntArray:
    """Makespans of a population; chromosomes that had to be repaired are replaced by the repair.

    Semi-active: operations are appended to their resource in the order of genes and start as early
    as lags, setups and the release allow. A gene whose operation cannot be placed yet (another
    chain must go first, or its bytes do not fit) is late: it is tried again, in the order of genes,
    whenever something changes that may help it. Where that ends in a deadlock the chromosome is
    decoded anew, and only what a banker's check calls safe is admitted.

    Parameters
    ----------
    encoding
        Of the graph.
    population
        Each row has gene g as often as chain g has operations. Afterwards every row that is not
        `STUCK` lists the genes in the order in which operations were placed.
    active
        Let Giffler and Thompson's algorithm decide, and the order of genes its conflicts only.
    out
        Where to write the makespans.

    Returns
    -------
    IntArray, shape (individuals,)
        Makespans, `STUCK` where operations are left over.
    """
    values = np.empty(len(population), np.int64) if out is None else out
    e = encoding
    if active and e.plain and e.n_genes <= GUIDED_UP_TO:
        _decode_guided(population, values, *e.lanes, *e.columns)
    elif active:
        _decode_active(e, population, values)
    elif e.plain:
        _decode_plain(population, values, e.lanes[1], *e.columns)
    else:
        _decode(population, values, e.indptr, e.operation, e.gene, *e.arrays[:19])
    return values


def guided(encoding: Encoding, rank: IntArray, genes: IntArray) -> int:
    """The active schedule that ranks lead to, without setups, bytes and arcs between chains.

    Parameters
    ----------
    encoding
        Of the graph.
    rank
        By place in the chains: of operations in conflict the one of least rank goes first.
    genes
        Where to write the chromosome.

    Returns
    -------
    int
        The makespan.
    """
    return int(_guided(rank, genes, *encoding.lanes, *encoding.columns))


def _decode_active(encoding: Encoding, population: Population, values: IntArray) -> None:
    """With every feature: list schedules, one by one."""
    arrays, gene = encoding.arrays, encoding.gene
    priority = np.empty(len(gene), np.int64)
    for row, genes in enumerate(population):
        priority[encoding.operations(genes)] = np.arange(len(gene))
        found = list_schedule(arrays, priority, active=True)
        if found is None:
            values[row] = STUCK
        else:
            operations, start = found
            genes[:] = gene[operations]
            values[row] = (start + arrays.duration).max()


def _chains(graph: Schedule) -> tuple[list[list[int]], IntArray]:
    """Operations of each job cut into paths of arcs, and the weight to the next on the path.

    One sweep in topological order: an operation continues the path of a predecessor, of its own
    micro-batch if there is one; paths are numbered by their smallest operation.
    """
    before = graph.predecessors
    indptr, other, weight = (column.tolist() for column in before)
    job, batch = graph.job.tolist(), graph.microbatch.tolist()
    path_of: dict[int, list[int]] = {}  # by last operation
    follows = np.zeros(graph.n_operations, np.int64)
    for i in evaluate(graph).order.tolist():
        open_ends = [
            (batch[t] != batch[i], t, e)
            for e in range(indptr[i], indptr[i + 1])
            if job[t := other[e]] == job[i] and t in path_of
        ]
        path: list[int] = []
        if open_ends:
            _, tail, e = min(open_ends)
            path = path_of.pop(tail)
            follows[tail] = weight[e]
        path.append(i)
        path_of[i] = path
    return sorted(path_of.values(), key=min), follows


def _bytes_matter(graph: Schedule, operation: IntArray, gene: IntArray) -> bool:
    """Whether held bytes can forbid an order: there is a limit, or some chain frees too early."""
    if graph.memory.any():
        return True
    resource = graph.single_resource[operation]
    order = np.lexsort((np.arange(len(operation)), resource, gene[operation]))
    change = (graph.acquire - graph.free)[operation[order]]
    level = np.cumsum(change)
    lane = gene[operation[order]] * (graph.n_resources + 1) + resource[order]
    first = np.searchsorted(lane, lane)
    return bool((level - (level - change)[first] < 0).any())


_MATRIX = types.Array(types.int64, 2, "C")


@entry(types.void, _MATRIX, INTS, *[READ] * 22)
def _decode(  # type: ignore[no-untyped-def]
    population, values, chain_ptr, operation, gene, duration, resource, release, indptr, successor,
    weight, n_before, family, setup_in, setup_out, acquire, free, workspace, memory, held_before,
    chain, chain_indptr, chain_operations, chain_before,
):  # fmt: skip
    """Semi-active makespans of all rows into `values`, with every feature.

    `chain*` but `chain_ptr` are the chains of the banker's check, made where it fails without.
    """
    n_rows, n = population.shape
    n_genes, n_resources = len(chain_ptr) - 1, len(memory)
    n_chains = len(chain_before)
    row = 0
    checked = False
    while row < n_rows:
        order = np.empty(n, np.int64)
        available = release.copy()
        waiting = n_before.copy()
        following = np.empty(n_genes, np.int64)
        for g in range(n_genes):
            following[g] = chain_ptr[g]
        owed = np.zeros(n_genes, np.int64)
        blocked = np.full(n_genes, -1, np.int64)
        late = np.empty(n, np.int64)
        machine_free = np.zeros(n_resources, np.int64)
        last = np.full(n_resources, -1, np.int64)
        level = held_before.copy()
        held = np.zeros(max(1, n_chains * n_resources), np.int64)
        scheduled = np.zeros(n, np.int64)
        in_flight = np.zeros(n_chains, np.int64)
        left_in_chain = np.empty(n_chains, np.int64)
        for c in range(n_chains):
            left_in_chain[c] = chain_indptr[c + 1] - chain_indptr[c]
        n_late = 0
        scan = 0  # late genes from here on are to be tried; n_late = none
        at = 0
        epoch = 0
        count = 0
        makespan = 0
        while count < n:
            is_late = scan < n_late
            if is_late:
                g = late[scan]
            elif at < n:
                g = population[row, at]
                at += 1
            else:
                break
            i = operation[following[g]]
            r = resource[i]
            fits = waiting[i] == 0 and blocked[g] != epoch and (is_late or owed[g] == 0)
            if fits and r >= 0:
                bytes_then = level[r] + acquire[i]
                fits = bytes_then >= free[i] and (
                    memory[r] == NO_LIMIT or bytes_then + workspace[i] <= memory[r]
                )
                if fits and checked and acquire[i] > free[i] and chain[i] >= 0:
                    fits = _safe(
                        i, resource, acquire, free, workspace, memory, chain, chain_indptr,
                        chain_operations, chain_before, level, held, scheduled, in_flight,
                    )  # fmt: skip
            if not fits:
                blocked[g] = epoch
                if is_late:
                    scan += 1
                else:
                    late[n_late] = g
                    n_late += 1
                    scan = n_late
                    owed[g] += 1
                continue
            if is_late:
                n_late -= 1
                for k in range(scan, n_late):
                    late[k] = late[k + 1]
                owed[g] -= 1
            start = available[i]
            helps = False
            if r >= 0:
                ready = machine_free[r]
                if last[r] >= 0 and family[last[r]] != family[i]:
                    ready += setup_out[last[r]] + setup_in[i]
                start = max(start, ready)
                machine_free[r] = start + duration[i]
                last[r] = i
                level[r] += acquire[i] - free[i]
                helps = acquire[i] != free[i]
            makespan = max(makespan, start + duration[i])
            c = chain[i]
            if c >= 0:
                held[c * n_resources + r] += acquire[i] - free[i]
                left_in_chain[c] -= 1
                in_flight[c] = left_in_chain[c] > 0
                helps = helps or left_in_chain[c] == 0
            scheduled[i] = 1
            following[g] += 1
            order[count] = i
            count += 1
            helps = helps or owed[g] > 0
            for e in range(indptr[i], indptr[i + 1]):
                j = successor[e]
                available[j] = max(available[j], start + weight[e])
                waiting[j] -= 1
                helps = helps or (waiting[j] == 0 and owed[gene[j]] > 0)
            if helps and n_late > 0:
                scan = 0
                epoch += 1
        if count < n and not checked and n_chains > 0:
            checked = True
            continue
        values[row] = makespan if count == n else STUCK
        if count == n:
            for k in range(n):
                population[row, k] = gene[order[k]]
        checked = False
        row += 1


@entry(types.void, _MATRIX, INTS, INT, *[READ] * 5)
def _decode_plain(  # type: ignore[no-untyped-def]
    population, values, n_lanes, chain_ptr, duration, resource, weight, release
):
    """Semi-active makespans of all rows; the chains are all there is. Columns by place in them."""
    n_rows, n = population.shape
    n_genes = len(chain_ptr) - 1
    following = np.empty(n_genes, np.int64)
    available = np.empty(n_genes, np.int64)
    machine_free = np.empty(n_lanes, np.int64)
    for row in range(n_rows):
        for g in range(n_genes):
            following[g] = chain_ptr[g]
            available[g] = 0
        for r in range(n_lanes):
            machine_free[r] = 0
        makespan = 0
        for k in range(n):
            g = population[row, k]
            p = following[g]
            following[g] = p + 1
            r = resource[p]
            start = max(max(available[g], release[p]), machine_free[r])
            end = start + duration[p]
            machine_free[r] = end
            available[g] = start + weight[p]
            makespan = max(makespan, end)
        values[row] = makespan


@entry(INT, READ, INTS, INT, INT, *[READ] * 5)
def _guided(  # type: ignore[no-untyped-def]
    rank, genes, n_resources, n_lanes, chain_ptr, duration, resource, weight, release
):
    """Giffler and Thompson's algorithm on chains alone; columns by place in them.

    In conflicts the least rank goes first. Fills `genes` in the order of placement; the makespan.
    """
    n, n_genes = len(rank), len(chain_ptr) - 1
    machine_free = np.zeros(n_lanes, np.int64)
    following = np.empty(n_genes, np.int64)
    available = np.empty(n_genes, np.int64)
    live = np.empty(n_genes, np.int64)
    for g in range(n_genes):
        following[g] = chain_ptr[g]
        available[g] = release[chain_ptr[g]]
        live[g] = g
    n_live = n_genes
    makespan = 0
    for k in range(n):
        star = -1  # index into `live`
        place = -1
        least = 0
        for a in range(n_live):
            g = live[a]
            p = following[g]
            r = resource[p]
            end = max(available[g], machine_free[r]) + duration[p]
            if star < 0 or end < least or (end == least and rank[p] < rank[place]):
                star = a
                place = p
                least = end
            if r >= n_resources:  # needs no resource: at once
                star = a
                place = p
                break
        r = resource[place]
        if r < n_resources:
            for a in range(n_live):
                g = live[a]
                p = following[g]
                if resource[p] != r or rank[p] >= rank[place]:
                    continue
                if max(available[g], machine_free[r]) < least:
                    star = a
                    place = p
        g = live[star]
        start = max(available[g], machine_free[r])
        machine_free[r] = start + duration[place]
        makespan = max(makespan, machine_free[r])
        genes[k] = g
        following[g] = place + 1
        if place + 1 < chain_ptr[g + 1]:
            available[g] = max(start + weight[place], release[place + 1])
        else:
            n_live -= 1
            live[star] = live[n_live]
    return makespan


@entry(types.void, _MATRIX, INTS, INT, INT, *[READ] * 5)
def _decode_guided(  # type: ignore[no-untyped-def]
    population, values, n_resources, n_lanes, chain_ptr, duration, resource, weight, release
):
    """Active makespans of all rows, the order of genes as the guide."""
    n_rows, n = population.shape
    following = np.empty(len(chain_ptr) - 1, np.int64)
    rank = np.empty(n, np.int64)
    for row in range(n_rows):
        for g in range(len(following)):
            following[g] = chain_ptr[g]
        for k in range(n):
            g = population[row, k]
            rank[following[g]] = k
            following[g] += 1
        values[row] = _guided(
            rank, population[row], n_resources, n_lanes, chain_ptr, duration, resource, weight,
            release,
        )  # fmt: skip
