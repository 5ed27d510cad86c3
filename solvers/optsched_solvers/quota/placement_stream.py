"""A stream of tasks onto nodes with shared GPUs: best, worst and first fit, random, FGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.quota.fragmentation import (
    GPU,
    class_table,
    demands,
    fragment,
    gradient,
    share_table,
    task_classes,
)
from optsched_solvers.quota.placement_input import arrivals

if TYPE_CHECKING:
    from optsched_solvers.quota.placement_input import Ints

BEST: Final = 0
WORST: Final = 1
FIRST: Final = 2
RANDOM: Final = 3
FGD: Final = 4

RULES: Final = {
    "best_fit": BEST, "worst_fit": WORST, "first_fit": FIRST, "random": RANDOM, "fgd": FGD,
}  # fmt: skip
"""Rules by name."""


class Placed(NamedTuple):
    """Where tasks went."""

    node: Ints
    """Of every task, -1 where it did not fit; shape (tasks,)."""
    gpus: Ints
    """The node's GPUs that the task uses, as a mask of bits; shape (tasks,)."""
    free_shares: Ints
    """Thousandths that are free afterwards; shape (nodes, GPUs)."""


def place_stream(
    free_shares: Any,
    demand: Any,
    rule: str = "fgd",
    *,
    classes: Any = None,
    events: Any = None,
    seed: int = 0,
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
        fit; ``fgd`` the smallest increase of `fragmentation` (Weng et al., ATC'23). Lowest
        numbers on ties.
    classes
        Rows of demand and popularity that `fgd` expects, as `fragmentation` takes them; by
        default the tasks given.
    events
        Order: i where task i comes, ~i (that is, -1 - i) where it gives its GPUs back; by default
        all come as numbered.
    seed
        Of ``random``.

    Returns
    -------
    Placed

    Raises
    ------
    InputError
        An unknown rule, wrong shapes or numbers, a task that ends before it comes.
    """
    if rule not in RULES:
        raise InputError(f"rule: {rule!r:.60} is none of {', '.join(RULES)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed: expected an integer from 0 to 2^31 - 1, got {seed!r:.60}")
    shares, wanted = share_table(free_shares).copy(), demands("demand", demand)
    kinds = task_classes(wanted) if classes is None else class_table(classes)
    order = arrivals(events, len(wanted))
    distinct, kind = np.unique(wanted, return_inverse=True)
    node, mask = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), np.int64)
    flat = shares.ravel()
    if len(shares):
        _stream(
            flat, len(shares), wanted, distinct, kind.astype(np.int64), order, RULES[rule],
            kinds[:, 0].copy(), kinds[:, 1].copy(), seed, node, mask,
        )  # fmt: skip
    return Placed(node, mask, shares)


@helper(INT, READ, INT, INT, INTS, INTS, INTS, counted=False)
def _sums(share, n, gpus, total, most, idle):  # type: ignore[no-untyped-def]
    """What a node has free: in sum, on its freest GPU, and idle GPUs."""
    total[n] = most[n] = idle[n] = 0
    for g in range(gpus):
        s = share[n * gpus + g]
        total[n] += s
        most[n] = max(most[n], s)
        idle[n] += 1 if s == GPU else 0
    return 0


@helper(INT, INTS, INT, INT, INT, INT, INT, counted=False)
def _pick(share, at, gpus, task, rule, random):  # type: ignore[no-untyped-def]
    """Mask of GPUs for a task on a node where it fits."""
    if task >= GPU:
        mask = 0
        for g in range(gpus):
            if task > 0 and share[at + g] == GPU:
                mask |= 1 << g
                task -= GPU
        return mask
    best, fit = -1, 0
    for g in range(gpus):
        s = share[at + g]
        if s < task:
            continue
        fit += 1
        if (
            best < 0
            or (rule == BEST and s < share[at + best])
            or (rule == WORST and s > share[at + best])
        ):
            best = g
    if rule == RANDOM:
        skip = random % fit
        for g in range(gpus):
            if share[at + g] >= task:
                if skip == 0:
                    return 1 << g
                skip -= 1
    return 1 << best


@entry(
    INT, INTS, INT, READ, READ, READ, READ, INT, READ, READ, INT, INTS, INTS
)  # fmt: skip
def _stream(  # type: ignore[no-untyped-def]
    share, nodes, task, distinct, kind, events, rule, demand, popularity, seed, node, mask
):
    """Place all tasks; fills node and mask, and changes the shares."""
    gpus, kinds = len(share) // nodes, len(distinct)
    total, most = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    idle, now = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    scored = rule == FGD
    changes = np.zeros(nodes, np.int64)
    size = kinds * nodes if scored else 0
    # per kind and node: at which change of the node it was scored, increase (-1: no fit), GPUs
    when, more = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    which, out = np.zeros(size, np.int64), np.zeros(2, np.int64)
    for n in range(nodes):
        _sums(share, n, gpus, total, most, idle)
        if scored:
            now[n] = fragment(share, n * gpus, gpus, demand, popularity)
    random = (seed * 2862933555777941757 + 3037000493) & 0x7FFFFFFFFFFFFFFF
    for e in events:
        i = e if e >= 0 else ~e
        t = task[i]
        n = node[i]
        if e >= 0:
            best = -1
            if scored:
                row = kind[i] * nodes
                for c in range(nodes):
                    if when[row + c] != changes[c]:
                        when[row + c] = changes[c]
                        which[row + c] = 0
                        fits = gradient(share, c * gpus, gpus, t, demand, popularity, now[c], out)
                        if fits == 1:
                            more[row + c], which[row + c] = out[0], out[1]
                    if which[row + c] == 0:
                        continue
                    if best < 0 or more[row + c] < more[row + best]:
                        best = c
                if best >= 0:
                    mask[i] = which[row + best]
            else:
                fit = 0
                for c in range(nodes):
                    if (t < GPU and most[c] < t) or (t >= GPU and idle[c] * GPU < t):
                        continue
                    fit += 1
                    if rule == RANDOM:
                        random = (random * 6364136223846793005 + 1442695040888963407) & (
                            0x7FFFFFFFFFFFFFFF
                        )
                        if (random >> 24) % fit == 0:
                            best = c
                    elif (
                        best < 0
                        or (rule == BEST and total[c] < total[best])
                        or (rule == WORST and total[c] > total[best])
                    ):
                        best = c
                if best >= 0:
                    mask[i] = _pick(share, best * gpus, gpus, t, rule, random >> 33)
            node[i] = n = best
        if n < 0:
            continue
        piece = min(t, GPU) if e >= 0 else -min(t, GPU)
        for g in range(gpus):
            if mask[i] >> g & 1:
                share[n * gpus + g] -= piece
        changes[n] += 1
        _sums(share, n, gpus, total, most, idle)
        if scored:
            now[n] = fragment(share, n * gpus, gpus, demand, popularity)
    return 0
