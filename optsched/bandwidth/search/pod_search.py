"""Exact choice of k GPUs across the pods of an idle cluster, from the best values of every pod.

Windows of pods by growing span, and in each the highest threshold that so many pods reach with
exactly k GPUs, by a subset sum with fewest parts; bounded by the best value so far.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.pods import UNIT_BITS, PodBandwidth
from optsched.bandwidth.models.tables import WIDTH
from optsched.bandwidth.search.ask import gpus_of
from optsched.bandwidth.search.pod_local import POD, assign_pod, local_values
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.topology.state import ClusterState

ABOVE: Final = 1 << 40
"""More pods than there are."""

MOST_CELLS: Final = 1 << 26
"""Pods times GPUs asked, up to which a search has memory."""


class PodChoice(NamedTuple):
    """An answer: its value, its GPUs by global number, and what no choice exceeds (kB/s)."""

    value: int
    gpus: tuple[int, ...]
    upper_bound: int
    exact: bool
    """Whether the value is proved to be the best, so that it equals the bound."""


def choose_pods(
    model: PodBandwidth,
    state: ClusterState,
    k: int,
    demands: Sequence[int] = (),
    work: int = 20_000_000,
) -> PodChoice:
    """Best k free GPUs of a cluster of pods, jobs of the state being tenants.

    Jobs interfere as one-sided contention with joint allocations filled from local id 0 has it: a
    job does where it shares a host with the choice, both are on several hosts, and its demand is
    above 0. Of equal values the first window of pods, then the lowest ids within a pod.

    Parameters
    ----------
    model
        Its local models need tables.
    state
        Of the same cluster.
    k
        GPUs asked for, 1 to the number of free ones.
    demands
        kB/s of every job; none of them matters by default.
    work
        About how many elementary steps a contended search may take until it answers with a bound
        in place of a proof.

    Raises
    ------
    InputError
        No k free GPUs are measured, or there are too many pods.
    """
    if k == 1:
        return PodChoice(0, state.free[:1], 0, True)
    if any(demands):
        from optsched.bandwidth.search.pod_tenants import choose_beside_tenants

        return choose_beside_tenants(model, state, k, demands, work)
    return idle_choice(model, state, k)


def idle_choice(model: PodBandwidth, state: ClusterState, k: int) -> PodChoice:
    """Best k >= 2 free GPUs by standalone bandwidth; see `choose_pods`."""
    cells = (len(model.pods) + 1) * (k + 1)
    if cells > MOST_CELLS:
        raise InputError(
            f"k: {k} GPUs on {len(model.pods)} pods are more than this search has memory for; "
            "ask for fewer, or make pods larger"
        )
    tables = model.pod_tables
    chosen = np.zeros(model.cluster.n_hosts, np.int64)
    value = int(search_idle(*tables, state.masks, k, chosen))
    if value < 0:
        raise InputError(f"k: every choice of {k} GPUs has a pattern that is not measured")
    return PodChoice(value, gpus_of(state, enumerate(chosen.tolist())), value, True)


@helper(INT, INT, INT)
def needed(value, power):  # type: ignore[no-untyped-def]
    """Least threshold whose product with a power of the factor is `value` or more."""
    if value <= 0:
        return 0
    if power <= 0:
        return NO_LIMIT
    return ((value << UNIT_BITS) + power - 1) // power


@helper(INT, READ, INT, INT, INT, INT, INT, INT, INTS)
def _enough(local, width, a, b, m, k, least, top):  # type: ignore[no-untyped-def]
    """Whether the m largest counts with values >= least of pods a..b reach k, both ends in use."""
    for c in range(width):
        top[c] = 0
    for p in range(a, b + 1):
        c = width - 1
        while c > 0 and local[p * width + c] < least:
            c -= 1
        if c == 0 and p in (a, b):
            return 0
        top[c] += 1
    left, reach = m, 0
    for c in range(width - 1, 0, -1):
        take = min(left, top[c])
        reach += take * c
        left -= take
        if reach >= k:
            return 1
    return 0


@helper(INT, READ, INT, INT, INT, INT, INT, INTS)
def fewest_pods(local, width, a, b, k, least, layers):  # type: ignore[no-untyped-def]
    """Fewest of the pods a..b with values >= least and exactly k GPUs in all; `ABOVE` if none.

    layers: filled from the last pod to the first, (b - a + 2) rows of k + 1 numbers.
    """
    row = k + 1
    for t in range(row):
        layers[t] = ABOVE
    layers[0] = 0
    at, reach = 0, 0
    for p in range(b, a - 1, -1):
        to = at + row
        for t in range(row):
            layers[to + t] = layers[at + t]
        grown = 0
        for c in range(1, min(width - 1, k) + 1):
            if local[p * width + c] >= least:
                grown = c
                for t in range(min(reach, k - c) + 1):
                    layers[to + c + t] = min(layers[to + c + t], layers[at + t] + 1)
        reach += grown
        at = to
    return min(layers[at + k], ABOVE)


@helper(INT, READ, INT, INT, INT, INT, INT, INTS, INTS)
def spread_counts(local, width, a, b, k, least, layers, counts):  # type: ignore[no-untyped-def]
    """Counts of fewest pods of a..b with values >= least: as many as can be in the first pods."""
    fewest_pods(local, width, a, b, k, least, layers)
    left = k
    for p in range(a, b + 1):
        at = (b - p + 1) * (k + 1)
        fewer = layers[at + left]
        for c in range(min(width - 1, left), 0, -1):
            if local[p * width + c] >= least and layers[at - k - 1 + left - c] + 1 == fewer:
                counts[p] = c
                left -= c
                break
    return left


@helper(INT, READ, INT, READ, INT, INTS)
def search_windows(local, width, powers, k, counts):  # type: ignore[no-untyped-def]
    """Best value over all sets of pods, -1 if none is measured; fills in counts by pod.

    local: L_p(c), -1 where there is none, rows of `width` numbers.
    """
    n_pods = len(local) // width
    best, best_a, best_b = -1, 0, 0
    most, rooms = 0, np.zeros(width, np.int64)
    for p in range(n_pods):
        if k < width and local[p * width + k] > best:
            best, best_a, best_b = local[p * width + k], p, p
        room = 0
        for c in range(1, width):
            if local[p * width + c] >= 0:
                room, most = c, max(most, local[p * width + c])
        rooms[room] += 1
    best_least = best
    fewest, reach = 0, 0
    for c in range(width - 1, 0, -1):
        for _ in range(rooms[c]):
            if reach < k:
                reach, fewest = reach + c, fewest + 1
    if reach < k:
        return -1
    fewest = max(fewest, 2)
    levels = np.sort(local)
    top, layers = np.zeros(width, np.int64), np.empty((n_pods + 1) * (k + 1), np.int64)
    for span in range(max(1, fewest - 1), n_pods):
        if needed(best + 1, powers[span + fewest - 2]) > most:
            break
        for a in range(n_pods - span):
            b = a + span
            for m in range(fewest, span + 2):
                power = powers[span + m - 2]
                least = needed(best + 1, power)
                if least > most:
                    break
                if _enough(local, width, a, b, m, k, least, top) == 0:
                    continue
                if fewest_pods(local, width, a, b, k, least, layers) > m:
                    continue
                low, high = np.searchsorted(levels, least), len(levels) - 1
                while low < high:  # the highest threshold that m pods reach
                    middle = (low + high + 1) // 2
                    good = _enough(local, width, a, b, m, k, levels[middle], top)
                    if good == 1:
                        good = fewest_pods(local, width, a, b, k, levels[middle], layers) <= m
                    if good == 1:
                        low = middle
                    else:
                        high = middle - 1
                best_a, best_b, best_least = a, b, levels[low]
                best = best_least * power >> UNIT_BITS
    if best >= 0:
        spread_counts(local, width, best_a, best_b, k, best_least, layers, counts)
    return best


@entry(INT, READ, READ, READ, READ, READ, READ, INT, INTS)
def search_idle(words, pods, hosts, single, powers, masks, k, chosen):  # type: ignore[no-untyped-def]
    """Best value of k >= 2 free GPUs, -1 if none is measured; fills masks (or counts) by host.

    First five: `PodTables`. masks: free GPUs by host of the cluster.
    """
    n_pods = len(pods) // POD
    width = 1
    for p in range(n_pods):
        width = max(width, pods[p * POD + 3] * (words[pods[p * POD] + WIDTH] - 1) + 1)
    width = min(width, k + 1)
    local = np.full(n_pods * width, -1, np.int64)
    local_values(words, pods, hosts, single, masks, k, width, local)
    counts = np.zeros(n_pods, np.int64)
    best = search_windows(local, width, powers, k, counts)
    for h in range(len(masks)):
        chosen[h] = 0
    if best < 0:
        return best
    for p in range(n_pods):
        if counts[p] > 0:
            assign_pod(
                words, pods, hosts, masks, p, counts[p], local[p * width + counts[p]], chosen
            )
    return best
