"""Fragmentation of GPUs by the tasks to be expected, and its gradient (Weng et al., ATC'23).

A node's fragment for a task class is all of its free GPU share if such a task cannot run there,
else the sum of the free shares of those GPUs whose share is less than min(demand, one GPU); a
node's fragmentation F is the popularity-weighted sum over the classes. Shares and demands are in
thousandths of a GPU, popularities are numbers of tasks, so that all sums are integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.quota.placement_input import counts

if TYPE_CHECKING:
    from optsched_solvers.quota.placement_input import Ints

GPU: Final = 1000
"""Thousandths."""
MOST_GPUS: Final = 62
"""On a node: sets of GPUs are masks of 62 bits."""


def fragmentation(free_shares: Any, classes: Any) -> Ints:
    """Popularity-weighted fragment of every node.

    Parameters
    ----------
    free_shares
        Free thousandths of every GPU, shape (nodes, GPUs); 0 also where a node has fewer GPUs.
    classes
        Rows of demand (1 to 999, or a multiple of 1000) and popularity, shape (classes, 2); see
        `task_classes`.

    Returns
    -------
    int64 array, shape (nodes,)
        Sum over classes of popularity times fragment; divided by 1000 times the sum of the
        popularities it is the expected number of GPUs that cannot be used.

    Raises
    ------
    InputError
        An array has another shape, or holds what is no share or no demand.
    """
    shares, kinds = share_table(free_shares), class_table(classes)
    result = np.empty(len(shares), np.int64)
    _all_nodes(shares.ravel(), shares.shape[1], kinds[:, 0].copy(), kinds[:, 1].copy(), result)
    return result


def task_classes(demand: Any) -> Ints:
    """Distinct demands of some tasks with their numbers, ascending; shape (classes, 2)."""
    kinds, popularity = np.unique(demands("demand", demand), return_counts=True)
    return np.stack((kinds, popularity), axis=1).astype(np.int64)


def demands(name: str, given: Any) -> Ints:
    """Checked demands in thousandths of a GPU."""
    array = counts(name, given)
    wrong = (array == 0) | ((array > GPU) & (array % GPU != 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"{name}: entry {at} is {array[at]} thousandths of a GPU; a task takes 1 to 999, or a "
            "multiple of 1000"
        )
    return array


def share_table(given: Any) -> Ints:
    """Checked free shares, shape (nodes, GPUs)."""
    array = np.asarray(given)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InputError(
            "free_shares: expected integers of shape (nodes, GPUs), got "
            f"{array.ndim} dimensions of {array.dtype}"
        )
    if array.shape[1] > MOST_GPUS:
        raise InputError(
            f"free_shares: {array.shape[1]} GPUs a node, at most {MOST_GPUS} are known"
        )
    counts("free_shares", array.ravel(), GPU)
    return np.ascontiguousarray(array, np.int64)


def class_table(given: Any) -> Ints:
    """Checked classes, shape (classes, 2)."""
    array = np.asarray(given)
    if array.ndim != 2 or array.shape[1] != 2:
        raise InputError(f"classes: expected shape (classes, 2), got {array.shape}")
    kinds = np.stack((demands("classes", array[:, 0]), counts("classes", array[:, 1])), axis=1)
    if len(kinds) and int(kinds[:, 1].sum()) > 2**40:
        raise InputError("classes: popularities sum to more than 2^40; divide them")
    return kinds


@helper(INT, READ, INT, INT, READ, READ, counted=False)
def fragment(share, at, gpus, demand, popularity):  # type: ignore[no-untyped-def]
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


@entry(INT, READ, INT, READ, READ, INTS)
def _all_nodes(share, gpus, demand, popularity, result):  # type: ignore[no-untyped-def]
    """F of every node."""
    for n in range(len(result)):
        result[n] = fragment(share, n * gpus, gpus, demand, popularity)
    return 0


@helper(INT, INTS, INT, INT, INT, READ, READ, INT, INTS, counted=False)
def gradient(share, at, gpus, task, demand, popularity, now, out):  # type: ignore[no-untyped-def]
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
        for g in range(gpus):
            if mask >> g & 1:
                share[at + g] = 0
        out[0] = fragment(share, at, gpus, demand, popularity) - now
        for g in range(gpus):
            if mask >> g & 1:
                share[at + g] = GPU
        out[1] = mask
        return 1
    found = 0
    for g in range(gpus):
        s = share[at + g]
        if s < task:
            continue
        seen = False
        for other in range(g):
            seen = seen or share[at + other] == s
        if seen:
            continue
        share[at + g] = s - task
        more = fragment(share, at, gpus, demand, popularity) - now
        share[at + g] = s
        if found == 0 or more < out[0]:
            out[0], out[1] = more, 1 << g
            found = 1
    return found
