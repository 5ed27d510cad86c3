"""From numbers of GPUs by host to GPUs, and the check of least bandwidths."""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.bandwidth import BottleneckBandwidth
from optsched.bandwidth.topology.rates import kilobytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.plan.counts import Counts
    from optsched.plan.snapshot import PlanJob

MOST_SUBSETS: Final = 100
"""Subsets of one host of which the fastest is taken; of more, the lowest ids are."""


class Cut(NamedTuple):
    """A distribution of the GPUs of a running job, or of the gang (-1), that is too slow."""

    job: int
    hosts: tuple[tuple[int, int], ...]
    proved: bool
    """Whether no GPUs of these hosts would be fast enough."""


class Chosen(NamedTuple):
    """Evicted jobs, and GPUs by host of moved jobs and of the gang."""

    evict: list[int]
    move: dict[int, dict[int, int]]
    place: dict[int, int]


class Assigned(NamedTuple):
    """GPUs of the gang and of moved jobs; or what is too slow."""

    gang: tuple[int, ...]
    move: dict[int, tuple[int, ...]]
    cuts: list[Cut]


class GpuIds:
    """Assigns GPUs of hosts, the fastest subsets first, and checks least bandwidths."""

    def __init__(self, counts: Counts, model: BandwidthModel | None) -> None:
        self.counts, self._model = counts, model
        self._best: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    @cached_property
    def model(self) -> BandwidthModel:
        """Bandwidths; the model of links and cards by default."""
        return self._model or BottleneckBandwidth(self.counts.snapshot.cluster)

    def assign(self, chosen: Chosen, request: PlanJob | None) -> Assigned:
        """Give the gang, then moved jobs, the largest first, GPUs of their hosts."""
        state, jobs = self.counts.state, self.counts.jobs
        pool: dict[int, list[int]] = {h: [] for h in range(state.cluster.n_hosts)}
        leaving = [self.counts.held[j] for j in (*chosen.evict, *chosen.move)]
        host_of = state.cluster.places[0]
        for gpus in (state.free, *leaving):
            for gpu in gpus:
                pool[host_of[gpu]].append(gpu)
        gang, move, cuts = tuple[int, ...](), {}, list[Cut]()
        if request is not None:
            gang = self._take(pool, chosen.place)
            cuts += self._too_slow(request, -1, gang, chosen.place)
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
    ) -> list[Cut]:
        """Return the distribution if these GPUs lack the bandwidth that the job needs."""
        if job.bandwidth is None:
            return []
        least = kilobytes("bandwidth", job.bandwidth)
        if self.model.of(gpus) >= least:
            return []
        first, down = self.counts.snapshot.cluster.first, set(self.counts.snapshot.state.down)
        every = {h: [g for g in range(first[h], first[h + 1]) if g not in down] for h in place}
        few = all(comb(len(every[h]), n) <= MOST_SUBSETS or n < 2 for h, n in place.items())
        ideal = self.model.of(self._take(every, place))
        return [Cut(j, tuple(sorted(place.items())), few and ideal < least)]
