"""Bandwidths across pods: the slowest pod, times a factor for every step between pods."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from optsched.bandwidth.models.model import (
    BandwidthModel,
    CountModel,
    Selection,
    UnmeasuredPattern,
    Which,
)
from optsched.bandwidth.topology.cluster import Cluster, Host
from optsched.bandwidth.topology.rates import MOST, UNMEASURED
from optsched.errors import InputError
from optsched.io.strict_json import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.bandwidth.topology.cluster import HostType
    from optsched.model.schedule import IntArray

OneGpuPod: TypeAlias = Literal["nic", "zero"]

UNIT_BITS: Final = 30
"""Powers of the factor are integers over 2^30."""

_FINE_BITS: Final = 120
"""Bits behind the point while powers are multiplied, so that 2^30ths come out right."""


class PodTables(NamedTuple):
    """What the kernels read of a `PodBandwidth`: flat arrays of integers."""

    words: IntArray
    """`CountTables.words` of all local models, one behind the other."""
    pods: IntArray
    """Four numbers a pod: where its words begin and end, its first place in `hosts`, its hosts."""
    hosts: IntArray
    """Hosts of the cluster, pod by pod, in the order of the local models."""
    single: IntArray
    """Value of a single GPU of every pod beside other pods; -1: not measured."""
    powers: IntArray
    """Powers of the factor over 2^30, from 0 on."""


class PodBandwidth(BandwidthModel):
    """B(S) = min L_p · f^(max(1, s) + m - 2) over the m pods in use; s: last minus first of them.

    On one pod B(S) is the local model's. Pods are the domains of the cluster's level `pod`, in the
    order of their first hosts. The factor stands for the fabric between pods: it is an assumption
    until it is fitted to measurements. Products are rounded down; values of local models without
    any limit count as 3,037 GB/s.

    Parameters
    ----------
    local
        Model of one pod, for all pods with as many hosts of the same types; several of them for
        pods of several kinds; or a function that makes a `CountModel` from the cluster of one pod,
        such as the class `BottleneckBandwidth` itself (called once for every kind of pods).
    cluster
        Has a level of pods.
    factor
        f in (0, 1].
    one_gpu_pod
        L_p of a pod with one GPU beside other pods: ``"nic"`` is the limit of pattern 1+1,
        ``"zero"`` is 0, as BandPilot's released model has it.

    Raises
    ------
    InputError
        The cluster has no pods, a pod has no local model, or a value is out of range.
    """

    def __init__(
        self,
        local: CountModel | Sequence[CountModel] | Callable[[Cluster], CountModel],
        cluster: Cluster,
        factor: float = 0.7,
        one_gpu_pod: OneGpuPod = "nic",
    ) -> None:
        if cluster.pod is None:
            raise InputError("cluster: has no level of pods, name one of its levels with pod=")
        real = isinstance(factor, (int, float, np.integer, np.floating))
        if isinstance(factor, bool) or not real or not 0 < factor <= 1:
            raise InputError(f"factor: expected a number above 0 and up to 1, got {factor!r:.60}")
        if one_gpu_pod not in ("nic", "zero"):
            raise InputError(f"one_gpu_pod: expected 'nic' or 'zero', got {one_gpu_pod!r:.60}")
        self.cluster = cluster
        self.factor = float(factor)
        self.one_gpu_pod: OneGpuPod = one_gpu_pod
        domains = cluster.domains(cluster.level(cluster.pod))
        self.pods = tuple(domains)
        """Names of the pods."""
        self.locals, self.local_of, self.hosts_of = _matched(local, cluster, domains)
        """Local models; which of them a pod has; and its hosts in that model's order."""
        first = self.locals[0]
        for other in self.locals[1:]:
            if (other.op, other.payload) != (first.op, first.payload):
                raise InputError(
                    f"local: models of {first.op} with {first.payload} bytes and of {other.op} "
                    f"with {other.payload} bytes do not go together"
                )
        self.op, self.payload = first.op, first.payload
        self.mixed = any(local.mixed for local in self.locals)
        self.assumed = tuple(dict.fromkeys(text for one in self.locals for text in one.assumed))

    @cached_property
    def powers(self) -> IntArray:
        """``floor(f^e · 2^30)`` for e = 0 .. 2 (pods - 1), for all that can occur."""
        numerator, denominator = self.factor.as_integer_ratio()
        step = (numerator << _FINE_BITS) // denominator
        fine = 1 << _FINE_BITS
        powers = np.zeros(2 * len(self.pods) - 1, np.int64)
        for e in range(len(powers)):
            powers[e] = fine >> (_FINE_BITS - UNIT_BITS)
            if not powers[e]:
                break
            fine = fine * step >> _FINE_BITS
        powers.flags.writeable = False
        return powers

    @cached_property
    def pod_of(self) -> IntArray:
        """The pod of every host."""
        of = {h: p for p, hosts in enumerate(self.hosts_of) for h in hosts}
        return np.array([of[h] for h in range(len(of))], np.int64)

    def single(self, which: Which = "value") -> IntArray:
        """L_p of one GPU beside other pods, by pod; -1 where pattern 1+1 is not measured."""
        if self.one_gpu_pod == "zero":
            return np.zeros(len(self.pods), np.int64)
        pair = np.ones((1, 2), np.int64)
        limits = [min(int(local.network(pair, which)[0]), MOST - 1) for local in self.locals]
        return np.array([limits[i] for i in self.local_of], np.int64)

    def predict(self, selection: Selection) -> IntArray:
        """B(S) of every row; see `BandwidthModel.predict`."""
        given = self.checked(selection)
        value = self._joined(given, [self._parts(given, i)[0] for i in range(len(self.locals))])
        if (value == UNMEASURED).any():
            what = self.op if self.payload is None else f"{self.op}, {self.payload} bytes"
            raise UnmeasuredPattern("1+1", what)
        return value

    def interval(self, selection: Selection) -> tuple[IntArray, IntArray]:
        """Ends of what B(S) may be."""
        given = self.checked(selection)
        parts = [self._parts(given, i, True) for i in range(len(self.locals))]
        low, high = ([part[end] for part in parts] for end in (0, 1))
        return self._joined(given, low, "low"), self._joined(given, high, "high")

    def _parts(self, given: Selection, local: int, ends: bool = False) -> list[IntArray]:
        """Values of the pods of one local model, shape (n, such pods): values, or both ends."""
        model = self.locals[local]
        columns = self._columns[local]
        rows = given[:, columns].reshape(-1, columns.shape[1])
        used = rows.any(axis=1)
        found = model.interval(rows[used]) if ends else (model.predict(rows[used]),)
        values = []
        for part in found:
            value = np.full(len(rows), UNMEASURED, np.int64)
            value[used] = np.minimum(part, MOST - 1)
            values.append(value.reshape(len(given), len(columns)))
        return values

    def _joined(self, given: Selection, parts: list[IntArray], which: Which = "value") -> IntArray:
        """B(S) from the values of all pods."""
        n, n_pods = len(given), len(self.pods)
        held = np.zeros((n, n_pods), np.int64)
        value = np.zeros((n, n_pods), np.int64)
        for local, part in enumerate(parts):
            pods = np.flatnonzero(self.local_of == local)
            rows = given[:, self._columns[local]]
            held[:, pods] = rows.sum(axis=2)
            value[:, pods] = part
        return self.joined(held, value, which)

    def joined(self, held: IntArray, value: IntArray, which: Which = "value") -> IntArray:
        """B(S) from its GPUs in every pod and their values, shape (n, pods); -1: unmeasured."""
        n_pods = len(self.pods)
        active = held > 0
        m = active.sum(axis=1)
        several = m > 1
        value = np.where((held == 1) & several[:, None], self.single(which), value)
        unmeasured = (active & (value == UNMEASURED)).any(axis=1)
        least = np.where(active, value, MOST).min(axis=1, initial=MOST)
        first = np.argmax(active, axis=1)
        last = n_pods - 1 - np.argmax(active[:, ::-1], axis=1)
        power = self.powers[np.where(several, last - first + m - 2, 0)]
        joint = np.where(m > 0, least * power >> UNIT_BITS, 0)
        return np.asarray(np.where(unmeasured, UNMEASURED, joint))

    @cached_property
    def _columns(self) -> list[IntArray]:
        """By local model the GPUs of its pods, shape (pods, GPUs a pod)."""
        first = self.cluster.first
        return [
            np.array(
                [
                    list(chain.from_iterable(range(first[h], first[h + 1]) for h in hosts))
                    for hosts, of in zip(self.hosts_of, self.local_of, strict=True)
                    if of == local
                ],
                np.int64,
            )
            for local in range(len(self.locals))
        ]

    @cached_property
    def pod_tables(self) -> PodTables:
        """Arrays for the kernels.

        Raises
        ------
        InputError
            A pod has too many patterns for a table.
        """
        words: list[IntArray] = []
        begin: list[int] = []
        end = 0
        for model in self.locals:
            tables = model.tables()
            if tables is None:
                raise InputError(
                    f"local: a pod of {model.cluster.n_hosts} hosts has too many patterns for a "
                    "table; make its pods smaller"
                )
            words.append(tables.words)
            begin.append(end)
            end += len(tables.words)
        pods, at = [], 0
        for local, hosts in zip(self.local_of, self.hosts_of, strict=True):
            pods.append([begin[local], begin[local] + len(words[local]), at, len(hosts)])
            at += len(hosts)
        return PodTables(
            np.concatenate(words),
            np.array(pods, np.int64).reshape(-1),
            np.array([h for hosts in self.hosts_of for h in hosts], np.int64),
            self.single(),
            np.ascontiguousarray(self.powers),
        )


def _matched(
    local: CountModel | Sequence[CountModel] | Callable[[Cluster], CountModel],
    cluster: Cluster,
    domains: dict[str, tuple[int, ...]],
) -> tuple[tuple[CountModel, ...], IntArray, tuple[tuple[int, ...], ...]]:
    """Local models, the one of every pod, and the hosts of every pod in its order."""
    make = local if not isinstance(local, BandwidthModel) and callable(local) else None
    given: list[CountModel] = []
    if make is None:
        given = [local] if isinstance(local, BandwidthModel) else list(local)  # type: ignore[arg-type]
    kinds: dict[frozenset[tuple[HostType, int]], int] = {}
    for i, model in enumerate(given):
        _check_local(model)
        kind = _kind(model.cluster, range(model.cluster.n_hosts))
        if kind in kinds:
            raise InputError(f"local: models {kinds[kind]} and {i} are for the same kind of pods")
        kinds[kind] = i
    models, of, ordered = given, [], []
    for name, hosts in domains.items():
        kind = _kind(cluster, hosts)
        if kind not in kinds and make is not None:
            model = make(_alone(cluster, hosts, name))
            _check_local(model)
            if _kind(model.cluster, range(model.cluster.n_hosts)) != kind:
                raise InputError(f"local: the model made for pod {name!r:.60} has other hosts")
            kinds[kind] = len(models)
            models.append(model)
        if kind not in kinds:
            parts = sorted(f"{count} x {t.name}" for t, count in kind)
            raise InputError(f"local: there is no model for pod {name!r:.60} ({shortened(parts)})")
        of.append(kinds[kind])
        waiting: dict[HostType, list[int]] = {}
        for h in reversed(hosts):
            waiting.setdefault(cluster.type(h), []).append(h)
        its = models[of[-1]].cluster
        ordered.append(tuple(waiting[its.type(i)].pop() for i in range(its.n_hosts)))
    for i in range(len(given)):
        if i not in of:
            raise InputError(f"local: no pod has the hosts of model {i}")
    return tuple(models), np.array(of, np.int64), tuple(ordered)


def _check_local(model: CountModel) -> None:
    if not isinstance(model, CountModel):
        raise InputError(f"local: expected a CountModel, got {type(model).__name__}")


def _kind(cluster: Cluster, hosts: Sequence[int]) -> frozenset[tuple[HostType, int]]:
    """How many hosts of which types."""
    return frozenset(Counter(cluster.type(h) for h in hosts).items())


def _alone(cluster: Cluster, hosts: tuple[int, ...], name: str) -> Cluster:
    """One pod as a cluster of its own."""
    used = {cluster.hosts[h].type for h in hosts}
    return Cluster(
        tuple(Host(cluster.hosts[h].name, cluster.hosts[h].type) for h in hosts),
        tuple(kind for kind in cluster.types if kind.name in used),
        name=name,
    )
