"""From numbers of GPUs by host to GPUs, and the check of least bandwidths."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.bandwidth import BottleneckBandwidth
from optsched.bandwidth.topology.rates import kilobytes
from optsched.plan.moves import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.plan.moves import Chosen, Counts
    from optsched.plan.snapshot import PlanJob

MOST_SUBSETS: Final = 100
"""Subsets of one host of which the fastest is taken; of more, the lowest ids are."""


class Assigned(NamedTuple):
    """GPUs of the gang and of moved jobs; or distributions that are too slow."""

    gang: tuple[int, ...]
    move: dict[int, tuple[int, ...]]
    cuts: list[tuple[Cut, bool]]
    """What to exclude, and whether no GPUs of these hosts would be fast enough."""


class GpuIds:
    """Assigns GPUs of hosts, the fastest subsets first."""

    def __init__(self, counts: Counts, model: BandwidthModel | None) -> None:
        self.counts, self._model = counts, model
        self._best: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        state = counts.snapshot.state
        host_of = state.cluster.host_of.tolist()
        self._free: dict[int, list[int]] = {h: [] for h in range(state.cluster.n_hosts)}
        for gpu in state.free:
            self._free[host_of[gpu]].append(gpu)
        self._held: list[dict[int, list[int]]] = []
        for job in state.jobs:
            held: dict[int, list[int]] = {}
            for gpu in job.gpus:
                held.setdefault(host_of[gpu], []).append(gpu)
            self._held.append(held)

    @property
    def model(self) -> BandwidthModel:
        """Bandwidths; the model of links and cards by default."""
        if self._model is None:
            self._model = BottleneckBandwidth(self.counts.snapshot.cluster)
        return self._model

    def assign(self, chosen: Chosen, request: PlanJob | None) -> Assigned:
        """Give the gang, then moved jobs, the largest first, GPUs of their hosts."""
        pool = {h: list(ids) for h, ids in self._free.items()}
        for j in (*chosen.evict, *chosen.move):
            for h, ids in self._held[j].items():
                pool[h] += ids
        jobs, cuts = self.counts.jobs, list[tuple[Cut, bool]]()
        gang: tuple[int, ...] = ()
        if request is not None:
            gang = self._take(pool, chosen.place)
            cuts += self._too_slow(request, -1, gang, chosen.place)
        move = {}
        for j in sorted(chosen.move, key=lambda j: (-jobs[j].gpus, j)):
            move[j] = self._take(pool, chosen.move[j])
            cuts += self._too_slow(jobs[j], j, move[j], chosen.move[j])
        return Assigned(gang, move, cuts)

    def _take(self, pool: dict[int, list[int]], place: Mapping[int, int]) -> tuple[int, ...]:
        """Take GPUs out of the pool."""
        found: list[int] = []
        for h, count in place.items():
            taken = self._fastest(tuple(sorted(pool[h])), count)
            pool[h] = [gpu for gpu in pool[h] if gpu not in taken]
            found += taken
        return tuple(sorted(found))

    def _fastest(self, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the fastest subset of the GPUs of one host."""
        if count >= len(ids) or count < 2 or comb(len(ids), count) > MOST_SUBSETS:
            return ids[:count]
        key = ids, count
        if key not in self._best:
            subsets = list(combinations(ids, count))
            values = self.model.of_sets(subsets)
            self._best[key] = subsets[values.index(max(values))]
        return self._best[key]

    def _too_slow(
        self, job: PlanJob, j: int, gpus: Sequence[int], place: Mapping[int, int]
    ) -> list[tuple[Cut, bool]]:
        """Return the distribution if these GPUs lack the bandwidth that the job needs."""
        if job.bandwidth is None:
            return []
        least = kilobytes("bandwidth", job.bandwidth)
        if self.model.of(gpus) >= least:
            return []
        first, down = self.counts.snapshot.cluster.first, set(self.counts.snapshot.state.down)
        every = {h: [g for g in range(first[h], first[h + 1]) if g not in down] for h in place}
        exact = all(comb(len(every[h]), n) <= MOST_SUBSETS or n < 2 for h, n in place.items())
        ideal = self.model.of(self._take(every, place))
        return [(Cut(j, tuple(sorted(place.items()))), exact and ideal < least)]
