"""Rules for a choice apart from its bandwidth: domains, balance, hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import shortened
from optsched.io.values import boolean, integer, one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

BALANCES: Final = ("free", "even", "exact")
ANY: Final = 2**31


class Bounds(NamedTuple):
    """Least and most GPUs of a choice on every host, shape (hosts,)."""

    least: IntArray
    most: IntArray
    domains: int = ANY
    """Most domains of the policy's preferred level."""

    @classmethod
    def free(cls, n_hosts: int, included: int | None = None) -> Bounds:
        """Any counts, but at least one GPU on an included host."""
        bounds = cls(np.zeros(n_hosts, np.int64), np.full(n_hosts, ANY, np.int64))
        if included is not None:
            bounds.least[included] = 1
        return bounds


@dataclass(frozen=True)
class Policy:
    """Which sets of GPUs are allowed.

    Parameters
    ----------
    required
        A level of the cluster (or ``"host"``): all GPUs in one of its domains.
    preferred
        A level (or ``"host"``): fewer of its domains count more than a higher bandwidth.
    balance
        ``"even"``: counts of the hosts used differ by one at most; ``"exact"``: not at all.
    min_hosts, max_hosts
        How many hosts are used.
    same_type
        All on hosts of one type.
    include
        Names of hosts that must be used.
    exclude
        Hosts, or some of their GPUs as in ``"n02:0,3"``, that must not be used.
    apart, apart_level
        Names of running jobs: their hosts, or their domains of this level, are not used. A job that
        does not run is no obstacle.
    max_per_host
        Most GPUs on a host.

    Raises
    ------
    InputError
        A field of a wrong type, or two that contradict each other.

    Examples
    --------
    >>> from optsched.bandwidth import ClusterState, Policy, synthetic
    >>> state = ClusterState.idle(synthetic.cluster("nvswitch", 2))
    >>> Policy(required="host", exclude=("n01:0",)).fault(state, [7, 8])
    'required: hosts n01, n02 are used, not one'
    """

    required: str | None = None
    preferred: str | None = None
    balance: Literal["free", "even", "exact"] = "free"
    min_hosts: int = 1
    max_hosts: int | None = None
    same_type: bool = False
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    apart: tuple[str, ...] | None = None
    apart_level: str = "host"
    max_per_host: int | None = None

    def __post_init__(self) -> None:
        for key in ("required", "preferred", "apart_level"):
            name = getattr(self, key)
            if name is not None and not isinstance(name, str):
                raise InputError(f"{key}: expected the name of a level, got {name!r:.60}")
        if self.max_per_host is not None:
            integer("max_per_host", self.max_per_host, 1, ANY)
        object.__setattr__(self, "same_type", boolean("same_type", self.same_type))
        one_of("balance", self.balance, BALANCES)
        integer("min_hosts", self.min_hosts, 1, ANY)
        if self.max_hosts is not None:
            integer("max_hosts", self.max_hosts, 1, ANY)
            if self.max_hosts < self.min_hosts:
                raise InputError(
                    f"min_hosts, max_hosts: {self.min_hosts} and {self.max_hosts} contradict "
                    "each other"
                )
        for key in ("include", "exclude", "apart"):
            names = getattr(self, key)
            given = () if names is None else names
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise InputError(f"{key}: expected a list of names, got {names!r:.60}")
            object.__setattr__(self, key, None if names is None else tuple(names))
        both = set(self.include or ()) & set(self.exclude or ())
        if both:
            raise InputError(f"include, exclude: host {min(both)!r:.60} is in both")

    @property
    def is_free(self) -> bool:
        """Whether it allows everything."""
        return self == Policy()

    @property
    def most_difference(self) -> int:
        """Return the largest difference between counts of hosts that are used."""
        return {"free": ANY, "even": 1, "exact": 0}[self.balance]

    def check(self, cluster: Cluster) -> None:
        """Raise an `InputError` for a level, host or part of a host that the cluster lacks."""
        for key in ("required", "preferred", "apart_level"):
            name = getattr(self, key)
            if name is not None:
                try:
                    cluster.level(name)
                except InputError as error:
                    raise InputError(f"{key}: {error.args[0]}") from None
        for name in self.include or ():
            cluster.host_index(name, "include")
        _excluded(cluster, self.exclude or ())

    def tiers(
        self, state: ClusterState, k: int, bounds: Bounds | None = None
    ) -> Iterator[Bounds | None]:
        """Yield bounds to try in turn, from the fewest domains of the preferred level.

        Without a preference the only ones are those given.
        """
        cluster, preferred, required = state.cluster, self.preferred, self.required
        if preferred is None or (required and cluster.level(required) >= cluster.level(preferred)):
            yield bounds
            return
        limits = self.bounds(cluster, bounds)
        room = np.minimum(self.usable(state).room, limits.most)
        hosts = [list(some) for some in cluster.domains(cluster.level(preferred)).values()]
        sums = np.array([(int(room[h].sum()), np.count_nonzero(room[h])) for h in hosts])
        reached = np.cumsum(-np.sort(-sums, axis=0), axis=0)
        fewest = 1 + int((reached < (k, self.min_hosts)).any(axis=1).sum())
        for domains in range(fewest, min(k, int((sums[:, 0] > 0).sum())) + 1):
            yield limits._replace(domains=domains)

    def domains(self, cluster: Cluster, gpus: Iterable[int]) -> int:
        """Count domains of the preferred level that GPUs use; 0 without a preference."""
        if self.preferred is None:
            return 0
        level, hosts = cluster.level(self.preferred), np.unique(cluster.host_of[list(gpus)])
        return len({_domain(cluster, level, h) for h in hosts.tolist()})

    def level(self, cluster: Cluster) -> int | None:
        """Return the level whose domain must hold all GPUs: `required`, else that of `fabrics`."""
        if self.required is not None:
            return cluster.level(self.required)
        return 0 if len(cluster.fabrics) > 1 else None

    def bounds(self, cluster: Cluster, others: Bounds | None = None) -> Bounds:
        """Return bounds by `include` and `max_per_host`, within other bounds."""
        least, most, _ = Bounds.free(cluster.n_hosts)
        least[[cluster.host_index(name) for name in self.include or ()]] = 1
        most[:] = self.max_per_host or ANY
        if others is not None:
            least, most = np.maximum(least, others.least), np.minimum(most, others.most)
            return Bounds(least, most, others.domains)
        return Bounds(least, most)

    def usable(self, state: ClusterState) -> ClusterState:
        """Return the state without free GPUs that `exclude` and `apart` forbid."""
        if not self.exclude and not self.apart:
            return state
        return state.without(self._barred(state))

    def _barred(self, state: ClusterState) -> frozenset[int]:
        cluster = state.cluster
        gpus = _excluded(cluster, self.exclude or ())
        others = [job.gpus for job in state.jobs if job.name in (self.apart or ())]
        if others:
            hosts = {int(cluster.host_of[gpu]) for held in others for gpu in held}
            level = cluster.level(self.apart_level)
            of = {_domain(cluster, level, h) for h in hosts}
            near = [h for h in range(cluster.n_hosts) if _domain(cluster, level, h) in of]
            gpus = gpus.union(*(range(cluster.first[h], cluster.first[h + 1]) for h in near))
        return gpus

    def fault(self, state: ClusterState, gpus: Iterable[int]) -> str:
        """Return the first rule that GPUs break, in one sentence, or ``""``; see `broken_by`."""
        cluster, chosen = state.cluster, sorted(gpus)
        counts = {h: n for h, n in enumerate(cluster.counts(chosen).tolist()) if n}
        broken = self.broken_by(cluster, counts)
        if broken:
            return broken
        for gpu in self._barred(state).intersection(chosen):
            return f"exclude, apart: GPU {cluster.gpu_name(gpu)} is used"
        if cluster.rails and len(counts) > 1:
            first = cluster.first.tolist()
            local = {h: [g - first[h] for g in chosen if first[h] <= g < first[h + 1]]
                     for h in counts}  # fmt: skip
            if len({tuple(ids) for ids in local.values()}) > 1:
                return f"rails: local ids differ between hosts: {cluster.written(chosen):.80}"
        return ""

    def broken_by(self, cluster: Cluster, counts: Mapping[int, int]) -> str:
        """Return the first rule on counts that a choice breaks, in one sentence, or ``""``.

        Parameters
        ----------
        cluster
            Whose hosts they are.
        counts
            Host to number of GPUs, without zeros. `preferred` is a wish and never broken.
        """
        used = list(counts.values())
        if (level := self.level(cluster)) is not None:
            names = {_domain(cluster, level, h) for h in counts}
            if len(names) > 1 and self.required is None:
                return f"{cluster.levels[0]}s {shortened(sorted(names))} are used, and not joined"
            if len(names) > 1:
                return f"required: {self.required}s {shortened(sorted(names))} are used, not one"
        if used and max(used) - min(used) > self.most_difference:
            return f"balance: counts from {min(used)} to {max(used)} are not {self.balance}"
        if not self.min_hosts <= len(used) <= (self.max_hosts or ANY):
            return (
                f"min_hosts, max_hosts: {len(used)} hosts are used, "
                f"allowed are {self.min_hosts}..{self.max_hosts or 'any'}"
            )
        if used and max(used) > (self.max_per_host or ANY):
            return f"max_per_host: {max(used)} GPUs are on one host, not {self.max_per_host}"
        if self.same_type and len({cluster.type_of[h] for h in counts}) > 1:
            return "same_type: hosts of several types are used"
        names = {cluster.hosts[h].name for h in counts}
        for name in self.include or ():
            if name not in names:
                return f"include: host {name!r} is not used"
        return ""


def check_policy(policy: object, cluster: Cluster) -> Policy:
    """Check that an object is a policy for a cluster; None allows everything."""
    rules = Policy() if policy is None else policy
    if not isinstance(rules, Policy):
        raise InputError(f"policy: expected a Policy, got {policy!r:.60}")
    rules.check(cluster)
    return rules


@lru_cache(maxsize=256)
def _excluded(cluster: Cluster, excluded: tuple[str, ...]) -> frozenset[int]:
    return frozenset(gpu for text in excluded for gpu in cluster.parse(text, "exclude"))


def _domain(cluster: Cluster, level: int, host: int) -> str:
    found = cluster.hosts[host]
    return found.name if level == len(cluster.levels) else "/".join(found.domains[: level + 1])
