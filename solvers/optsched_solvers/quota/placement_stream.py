"""A stream of tasks onto nodes with shared GPUs: best, worst and first fit, random, FGD.

A node's fragment for a task class is all of its free GPU share if such a task cannot run there,
else the sum of the free shares of those GPUs whose share is less than min(demand, one GPU); a
node's fragmentation F is the popularity-weighted sum over the classes (Weng et al., ATC'23). Shares
and demands are in thousandths of a GPU, popularities are numbers of tasks, so sums are integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.quota.arrays import integers

if TYPE_CHECKING:
    from optsched_solvers.quota.arrays import IntArray

GPU: Final = 1000
"""Thousandths."""
MOST_GPUS: Final = 62
"""On a node: sets of GPUs are masks of 62 bits."""

BEST, WORST, FIRST, RANDOM, FGD = range(5)
RULES: Final = {
    "best_fit": BEST, "worst_fit": WORST, "first_fit": FIRST, "random": RANDOM, "fgd": FGD,
}  # fmt: skip
"""Rules by name."""


class Placed(NamedTuple):
    """Where tasks went."""

    node: IntArray
    """Of every task, -1 where it did not fit; shape (tasks,)."""
    gpus: IntArray
    """The node's GPUs that the task uses, as a mask of bits; shape (tasks,)."""
    free_shares: IntArray
    """Thousandths that are free afterwards; shape (nodes, GPUs)."""


def place_stream(
    free_shares: Any, demand: Any, rule: str = "fgd", *, classes: Any = None, seed: int = 0
) -> Placed:
    """Place tasks one after the other, each on one node.

    A task of less than a GPU shares one; a task of whole GPUs takes idle ones, lowest first. A
    task that does not fit is dropped.

    Parameters
    ----------
    free_shares
        Free thousandths of every GPU, shape (nodes, GPUs); 0 where a node has fewer GPUs.
    demand
        Thousandths of every task, 1 to 999 or a multiple of 1000; shape (tasks,).
    rule
        ``best_fit`` the node with the least free share in which the task fits, on it the GPU with
        the least; ``worst_fit`` the most; ``first_fit`` the lowest numbers; ``random`` any that
        fit; ``fgd`` the smallest increase of fragmentation. Lowest numbers on ties.
    classes
        Rows of demand and popularity that `fgd` expects, shape (classes, 2); by default the tasks
        given (`task_classes`).
    seed
        Of ``random``.

    Returns
    -------
    Placed

    Raises
    ------
    InputError
        An unknown rule, wrong shapes or numbers.
    """
    if rule not in RULES:
        raise InputError(f"rule: {rule!r:.60} is none of {', '.join(RULES)}")
    seed = integer("seed", seed, 0, 2**31 - 1)
    shares = np.array(free_shares)
    if shares.ndim != 2 or shares.shape[1] > MOST_GPUS:
        raise InputError(
            f"free_shares: expected shape (nodes, at most {MOST_GPUS} GPUs), got {shares.shape}"
        )
    flat = integers("free_shares", shares.ravel(), most=GPU).copy()
    wanted = _demands("demand", demand)
    kinds = task_classes(wanted) if classes is None else np.asarray(classes)
    if kinds.ndim != 2 or kinds.shape[1] != 2:
        raise InputError(f"classes: expected shape (classes, 2), got {kinds.shape}")
    of, popularity = _demands("classes", kinds[:, 0]), integers("classes", kinds[:, 1], most=2**30)
    distinct, kind = np.unique(wanted, return_inverse=True)
    node, mask = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), np.int64)
    if len(shares):
        _stream(
            flat, len(shares), wanted, len(distinct), kind.astype(np.int64), RULES[rule], of,
            popularity, seed, node, mask,
        )  # fmt: skip
    return Placed(node, mask, flat.reshape(shares.shape))


def task_classes(demand: Any) -> IntArray:
    """Distinct demands of some tasks with their numbers, ascending; shape (classes, 2)."""
    kinds, popularity = np.unique(_demands("demand", demand), return_counts=True)
    return np.stack((kinds, popularity), axis=1).astype(np.int64)


def _demands(name: str, given: Any) -> IntArray:
    """Checked demands in thousandths of a GPU."""
    array = integers(name, given, most=2**31 - 1)
    for at in np.flatnonzero((array == 0) | ((array > GPU) & (array % GPU != 0)))[:1]:
        raise InputError(
            f"{name}: entry {at} is {array[at]} thousandths of a GPU; a task takes 1 to 999, or a "
            "multiple of 1000"
        )
    return array


@helper(INT, READ, INT, INT, READ, READ, counted=False)
def _fragment(share, at, gpus, demand, popularity):  # type: ignore[no-untyped-def]
    """F of the node whose shares begin at `at`: by the definition, class by class."""
    total = most = idle = 0
    for g in range(gpus):
        s = share[at + g]
        total += s
        most = max(most, s)
        idle += 1 if s == GPU else 0
    result = 0
    for m in range(len(demand)):
        d = demand[m]
        lost = 0
        if (d < GPU and most < d) or (d >= GPU and idle * GPU < d):
            lost = total
        else:
            need = min(d, GPU)
            for g in range(gpus):
                if share[at + g] < need:
                    lost += share[at + g]
        result += popularity[m] * lost
    return result


@helper(INT, INTS, INT, INT, INT, READ, READ, INT, INTS, counted=False)
def _gradient(share, at, gpus, task, demand, popularity, now, out):  # type: ignore[no-untyped-def]
    """Least increase of F if a task comes to the node, and the GPUs for it; 0 if it does not fit.

    now: F of the node as it is. out: increase, mask of GPUs. A task of whole GPUs takes the
    lowest idle ones. `share` is as before afterwards.
    """
    if task >= GPU:
        mask, left = 0, task
        for g in range(gpus):
            if left > 0 and share[at + g] == GPU:
                mask |= 1 << g
                left -= GPU
        if left > 0:
            return 0
        _add(share, at, gpus, mask, -GPU)
        out[0] = _fragment(share, at, gpus, demand, popularity) - now
        _add(share, at, gpus, mask, GPU)
        out[1] = mask
        return 1
    found = 0
    for g in range(gpus):
        s = share[at + g]
        seen = False
        for other in range(g):
            seen = seen or share[at + other] == s
        if s < task or seen:
            continue
        share[at + g] = s - task
        more = _fragment(share, at, gpus, demand, popularity) - now
        share[at + g] = s
        if found == 0 or more < out[0]:
            out[0], out[1] = more, 1 << g
            found = 1
    return found


@helper(INT, INTS, INT, INT, INT, INT, counted=False)
def _add(share, at, gpus, mask, amount):  # type: ignore[no-untyped-def]
    """Change the shares of some GPUs of a node."""
    for g in range(gpus):
        if mask >> g & 1:
            share[at + g] += amount
    return 0


@helper(INT, INTS, INT, INT, INT, INT, INT, counted=False)
def _pick(share, at, gpus, task, rule, random):  # type: ignore[no-untyped-def]
    """Mask of GPUs for a task on a node where it fits."""
    mask, best, fit = 0, -1, 0
    for g in range(gpus):
        s = share[at + g]
        if task >= GPU:
            if s == GPU and fit * GPU < task:
                mask |= 1 << g
                fit += 1
        elif s >= task:
            fit += 1
            if rule == RANDOM:
                random = random * 25214903917 + 11 & 0xFFFFFFFFFFFF
                better = (random >> 16) % fit == 0
            else:
                better = rule == BEST and s < share[at + best]
                better = better or (rule == WORST and s > share[at + best])
            best = g if best < 0 or better else best
    return mask if task >= GPU else 1 << best


@entry(INT, INTS, INT, READ, INT, READ, INT, READ, READ, INT, INTS, INTS)
def _stream(  # type: ignore[no-untyped-def]
    share, nodes, task, kinds, kind, rule, demand, popularity, seed, node, mask
):
    """Place all tasks; fills node and mask, and changes the shares."""
    gpus = len(share) // nodes
    total, most = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    idle, now = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    changes = np.zeros(nodes, np.int64)
    # per kind and node: at which change of the node it was scored, increase, GPUs (0: no fit)
    size = kinds * nodes if rule == FGD else 0
    when, more = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    which, out = np.zeros(size, np.int64), np.zeros(2, np.int64)
    random = (seed * 2862933555777941757 + 3037000493) & 0x7FFFFFFFFFFFFFFF
    n = -1
    for i in range(-1, len(task)):
        # sums of the node that has changed; of all at first
        for c in range(0 if i < 0 else n, nodes if i < 0 else n + 1):
            if c < 0:
                break
            total[c] = most[c] = idle[c] = 0
            for g in range(gpus):
                s = share[c * gpus + g]
                total[c] += s
                most[c] = max(most[c], s)
                idle[c] += 1 if s == GPU else 0
            changes[c] += 1
            if rule == FGD:
                now[c] = _fragment(share, c * gpus, gpus, demand, popularity)
        if i < 0:
            continue
        t, best, fit = task[i], -1, 0
        row = kind[i] * nodes
        for c in range(nodes):
            if rule == FGD:
                at = row + c
                if when[at] != changes[c]:
                    when[at], which[at] = changes[c], 0
                    if _gradient(share, c * gpus, gpus, t, demand, popularity, now[c], out) == 1:
                        more[at], which[at] = out[0], out[1]
                if which[at] != 0 and (best < 0 or more[at] < more[row + best]):
                    best = c
                continue
            if (t < GPU and most[c] < t) or (t >= GPU and idle[c] * GPU < t):
                continue
            fit += 1
            if rule == RANDOM:
                random = (random * 6364136223846793005 + 1442695040888963407) & (0x7FFFFFFFFFFFFFFF)
                if (random >> 24) % fit == 0:
                    best = c
            elif (
                best < 0
                or (rule == BEST and total[c] < total[best])
                or (rule == WORST and total[c] > total[best])
            ):
                best = c
        n = best
        if n >= 0:
            node[i] = n
            mask[i] = (
                which[row + n]
                if rule == FGD
                else _pick(share, n * gpus, gpus, t, rule, random >> 33)
            )
            _add(share, n * gpus, gpus, mask[i], -min(t, GPU))
    return 0
