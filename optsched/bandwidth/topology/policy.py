"""Rules for a choice besides its bandwidth: domains, balance, slices, hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.errors import InputError
from optsched.io.strict_json import shortened
from optsched.io.values import integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.topology.cluster import Cluster

BALANCES: Final = ("free", "even", "exact")
ANY: Final = 2**31


@dataclass(frozen=True)
class Policy:
    """Which sets of GPUs are allowed; all rules are on the numbers of GPUs on hosts.

    Parameters
    ----------
    required
        A level of the cluster (or ``"host"``): all GPUs in one of its domains.
    preferred
        The narrowest level from this one upwards in which the request fits; none is required.
    slice_size, slice_level
        The choice splits into groups of this size, each within one domain of the level.
    balance
        ``"even"``: counts of the hosts used differ by one at most; ``"exact"``: not at all.
    min_hosts, max_hosts
        How many hosts are used.
    same_type
        All on hosts of one type.
    include, exclude
        Names of hosts that must, or must not, be used.

    Raises
    ------
    InputError
        A field of a wrong type, or two that contradict each other.
    """

    required: str | None = None
    preferred: str | None = None
    slice_size: int | None = None
    slice_level: str | None = None
    balance: Literal["free", "even", "exact"] = "free"
    min_hosts: int = 1
    max_hosts: int | None = None
    same_type: bool = False
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for key in ("required", "preferred", "slice_level"):
            name = getattr(self, key)
            if name is not None and not isinstance(name, str):
                raise InputError(f"{key}: expected the name of a level, got {name!r:.60}")
        if not isinstance(self.same_type, bool):
            raise InputError(f"same_type: expected true or false, got {self.same_type!r:.60}")
        if self.balance not in BALANCES:
            raise InputError(
                f"balance: expected one of {', '.join(BALANCES)}, got {self.balance!r:.60}"
            )
        if (self.slice_size is None) != (self.slice_level is None):
            raise InputError("slice_size, slice_level: expected both or neither")
        if self.slice_size is not None:
            integer("slice_size", self.slice_size, 1, ANY)
        integer("min_hosts", self.min_hosts, 1, ANY)
        if self.max_hosts is not None:
            integer("max_hosts", self.max_hosts, 1, ANY)
            if self.max_hosts < self.min_hosts:
                raise InputError(
                    f"min_hosts, max_hosts: {self.min_hosts} and {self.max_hosts} contradict "
                    "each other"
                )
        for key in ("include", "exclude"):
            names = getattr(self, key)
            given = () if names is None else names
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise InputError(f"{key}: expected a list of host names, got {names!r:.60}")
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
        """Between the counts of hosts that are used."""
        return {"free": ANY, "even": 1, "exact": 0}[self.balance]

    def check(self, cluster: Cluster) -> None:
        """Raise an `InputError` for a level or a host that the cluster has not."""
        for key in ("required", "preferred", "slice_level"):
            name = getattr(self, key)
            if name is not None:
                try:
                    cluster.level(name)
                except InputError as error:
                    raise InputError(f"{key}: {error.args[0]}") from None
        for key in ("include", "exclude"):
            for name in getattr(self, key) or ():
                cluster.host_index(name, key)

    def broken_by(self, cluster: Cluster, counts: Mapping[int, int]) -> str:
        """The first rule that a choice breaks, in one sentence, or ``""``.

        Parameters
        ----------
        cluster
            Whose hosts they are.
        counts
            Host to number of GPUs, without zeros. `preferred` is a wish and never broken.
        """
        used = list(counts.values())
        if self.required is not None:
            names = {_domain(cluster, self.required, h) for h in counts}
            if len(names) > 1:
                return f"required: {self.required}s {shortened(sorted(names))} are used, not one"
        if used and max(used) - min(used) > self.most_difference:
            return f"balance: counts from {min(used)} to {max(used)} are not {self.balance}"
        if not self.min_hosts <= len(used) <= (self.max_hosts or ANY):
            return (
                f"min_hosts, max_hosts: {len(used)} hosts are used, "
                f"allowed are {self.min_hosts}..{self.max_hosts or 'any'}"
            )
        if self.same_type and len({cluster.type_of[h] for h in counts}) > 1:
            return "same_type: hosts of several types are used"
        names = {cluster.hosts[h].name for h in counts}
        for name in self.include or ():
            if name not in names:
                return f"include: host {name!r} is not used"
        for name in self.exclude or ():
            if name in names:
                return f"exclude: host {name!r} is used"
        if self.slice_size is not None and self.slice_level is not None:
            sums: dict[str, int] = {}
            for h, count in counts.items():
                domain = _domain(cluster, self.slice_level, h)
                sums[domain] = sums.get(domain, 0) + count
            for domain, total in sums.items():
                if total % self.slice_size:
                    return (
                        f"slice_size: {total} GPUs in {self.slice_level} {domain!r} are no whole "
                        f"slices of {self.slice_size}"
                    )
        return ""


def check_rules(policy: object, contention: object) -> None:
    """Refuse what is no `Policy` or no `Contention`; None is either."""
    from optsched.bandwidth.models.contention import Contention

    if policy is not None and not isinstance(policy, Policy):
        raise InputError(f"policy: expected a Policy, got {policy!r:.60}")
    if contention is not None and not isinstance(contention, Contention):
        raise InputError(f"contention: expected a Contention, got {contention!r:.60}")


def share_of(place: str, given: Any) -> float:
    """A share in 0..1."""
    return number(place, given, most=1.0, what="a share")


def _domain(cluster: Cluster, level: str, host: int) -> str:
    at = cluster.level(level)
    found = cluster.hosts[host]
    return found.name if at == len(cluster.levels) else "/".join(found.domains[: at + 1])
