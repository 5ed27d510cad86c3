"""GPU placement: which k of the free GPUs give a job the most bandwidth beside the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from optsched.bandwidth.models.contention import (
    Share,
    Traffic,
    check_traffic,
    demands,
    share,
)
from optsched.bandwidth.models.model import BandwidthModel, Interval, MeasuredOnly
from optsched.bandwidth.placement.checks import Request, check_requests, faults_of
from optsched.bandwidth.search.what_if import regret, victims
from optsched.bandwidth.topology.feasibility import impossible
from optsched.bandwidth.topology.policy import Policy, check_policy, share_of
from optsched.bandwidth.topology.ranks import hostfile, rank_order, visible_devices
from optsched.bandwidth.topology.rates import MOST, shown
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.values import integer, label, one_of
from optsched.model.schedule import Csr, Problem, Schedule

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.tables import CountTables
    from optsched.bandwidth.topology.cluster import Cluster

ON_UNMEASURED: Final = ("predict", "robust", "measured")
OBJECTIVES: Final = ("sum", "max_min")
RATIO: Final = 10**9
"""The objective ``"max_min"`` counts in parts of this."""


@dataclass(frozen=True)
class GpuSets:
    """What a solver finds: the GPUs of every request, by global number."""

    gpus: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> GpuSets:
        """From any sets of numbers."""
        return cls(tuple(tuple(sorted(int(gpu) for gpu in one)) for one in sets))


@dataclass(frozen=True, init=False, eq=False, repr=False)
class GpuPlacement(Problem):
    """Of the free GPUs choose k with the highest bandwidth beside the running jobs.

    Minimised is the negative bandwidth in kB/s. Among choices that are within `tolerance` of the
    best, demand are, one after the other: the fewest domains, from the top level down; the fewest
    hosts; most hosts left entirely free; the heaviest pairs in what is left; the highest bandwidths
    of all that is left; the highest bandwidth; the lowest ids.

    Parameters
    ----------
    state
        Free GPUs and running jobs.
    model
        Standalone bandwidths; of the same cluster.
    gpus
        k, for a single request; else give `requests`.
    requests
        Several, decided together: disjoint, and each a tenant to the others.
    policy
        Rules for a single request.
    traffic, seed
        Demands of the running jobs, see `optsched.bandwidth.models.contention.demands`.
    tolerance
        Share of the best bandwidth that may be lost for a better rest, to the millionth.
    on_unmeasured
        What to do where the model only predicts: ``"predict"`` takes its value, ``"robust"``
        maximises what is certain, ``"measured"`` takes only what is known exactly.
    max_regret
        If what could be lost at most by predicting is a larger share than this of the choice's
        bandwidth, be robust instead.
    objective
        Of several requests: ``"sum"`` of bandwidths, or ``"max_min"`` of bandwidths relative to
        the best each could get alone.
    name
        Label.

    Raises
    ------
    InputError
        A field of a wrong type, a number that cannot be, another cluster; the message names it.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, ClusterState, synthetic
    >>> cluster = synthetic.cluster("nvswitch", 2)
    >>> state = ClusterState.idle(cluster).take("n01:6,7", "a")
    >>> problem = optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 8)
    >>> problem.choice(optsched.solve(problem).schedule).gpus
    (8, 9, 10, 11, 12, 13, 14, 15)
    """

    state: ClusterState
    model: BandwidthModel
    requests: tuple[Request, ...]
    traffic: Traffic
    seed: int
    tolerance: float
    on_unmeasured: str
    max_regret: float | None
    objective: str
    name: str

    def __init__(
        self,
        state: ClusterState,
        model: BandwidthModel,
        gpus: int | None = None,
        *,
        requests: Sequence[Request] = (),
        policy: Policy | None = None,
        traffic: Traffic = "given",
        seed: int = 0,
        tolerance: float = 0.0,
        on_unmeasured: Literal["predict", "robust", "measured"] = "predict",
        max_regret: float | None = None,
        objective: Literal["sum", "max_min"] = "sum",
        name: str = "",
    ) -> None:
        if not isinstance(state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {state!r:.60}")
        if not isinstance(model, BandwidthModel):
            raise InputError(f"model: expected a BandwidthModel, got {model!r:.60}")
        if state.cluster is not model.cluster and state.cluster.sha256 != model.cluster.sha256:
            raise InputError("state, model: are of different clusters (use model.cluster)")
        if not isinstance(requests, (list, tuple)):
            raise InputError(f"requests: expected a list of Requests, got {requests!r:.60}")
        check_policy(policy)
        if (gpus is None) == (not requests):
            raise InputError("gpus, requests: expected one of them")
        if requests and policy is not None:
            raise InputError("policy: of several requests each has its own")
        given = tuple(requests) or (Request("job", gpus, policy or Policy()),)  # type: ignore[arg-type]
        check_requests(state, given)
        values: dict[str, Any] = {
            "state": state, "model": model, "requests": given,
            "traffic": traffic, "seed": integer("seed", seed, 0, 2**31 - 1),
            "tolerance": share_of("tolerance", tolerance),
            "on_unmeasured": one_of("on_unmeasured", on_unmeasured, ON_UNMEASURED),
            "max_regret": None if max_regret is None else share_of("max_regret", max_regret),
            "objective": one_of("objective", objective, OBJECTIVES), "name": label("name", name),
        }  # fmt: skip
        self.__dict__.update(values)
        check_traffic(traffic)

    problem_kind: ClassVar[str] = "gpus"

    # what solvers read

    @property
    def objective_name(self) -> str:
        """``"bandwidth"``, or ``"relative bandwidth"`` for max_min; the negative is minimised."""
        fair = self.objective == "max_min" and len(self.requests) > 1
        return "relative bandwidth" if fair else "bandwidth"

    @property
    def n_operations(self) -> int:
        """Running jobs and requests."""
        return len(self.state.jobs) + len(self.requests)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the state and the model."""
        return self.state.cluster

    @property
    def k(self) -> int:
        """GPUs of the only request."""
        self.single("k")
        return self.requests[0].gpus

    @property
    def policy(self) -> Policy:
        """Rules of the only request."""
        self.single("policy")
        return self.requests[0].policy

    def single(self, what: str) -> None:
        """Raise an `InputError` unless there is one request only."""
        if len(self.requests) != 1:
            raise InputError(f"{what}: there are {len(self.requests)} requests, not one")

    @cached_property
    def demands(self) -> tuple[int, ...]:
        """kB/s of every running job; where intervals count, the most that it may ask for."""
        model = Interval(self.model, "high") if self.is_robust else self.model
        return demands(model, self.state, self.traffic, self.seed)

    @cached_property
    def is_robust(self) -> bool:
        """Whether lower ends of intervals are maximised: by choice, or by the regret."""
        if self.on_unmeasured == "robust":
            return True
        if self.max_regret is None or self.on_unmeasured == "measured":
            return False
        choice = self.changed(max_regret=None)._best_choice()
        if choice is None or choice.regret is None:
            return False
        return choice.regret > self.max_regret * choice.bandwidth

    @cached_property
    def judged_by(self) -> BandwidthModel:
        """The model that decides: the given one, its lower ends, or what is measured."""
        if self.on_unmeasured == "measured":
            return MeasuredOnly(self.model)
        return Interval(self.model, "low") if self.is_robust else self.model

    @cached_property
    def tables(self) -> CountTables | None:
        """Tables for kernels; None if the model has none."""
        return self.judged_by.tables()

    def changed(self, **fields: Any) -> GpuPlacement:
        """The same problem with other fields."""
        kept: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclass_fields(self)}
        unknown = set(fields) - {*kept, "gpus", "policy"}
        if unknown:
            raise InputError(f"changed: there is no field {min(unknown)!r:.60}")
        kept.update(fields)
        if "gpus" in kept:
            kept.pop("requests")
        return GpuPlacement(**kept)

    # judging

    def shares(self, chosen: Sequence[Sequence[int]]) -> list[Share]:
        """What every request gets, if the r-th gets the GPUs ``chosen[r]``.

        Raises
        ------
        UnmeasuredPattern
            The model does not know a set that this takes.
        """
        found = []
        for r, gpus in enumerate(chosen):
            state, demand = self.state, self.demands
            for other, theirs in enumerate(chosen):
                if other != r:
                    name = f"request {self.requests[other].name}"
                    state = state.with_jobs([*state.jobs, Job(name, tuple(theirs))])
                    demand = (*demand, self.judged_by.of(theirs))
            found.append(share(self.judged_by, state, gpus, demand))
        return found

    def best(self, policy: Policy | None, k: int | None = None, *, ties: bool = False) -> Any:
        """The best `Answer` by counts for k under a policy; None without tables."""
        from optsched.bandwidth.search.ask import ask

        size = self.k if k is None else k
        if self.tables is None or not 1 <= size <= len(self.state.free):
            return None
        return ask(
            self.tables, self.state, self.demands, size, policy, ties=ties,
            tolerance=self.tolerance if ties else 0.0,
        )  # fmt: skip

    def _best_choice(self) -> DispatchChoice | None:
        """What `counts` answers; None if there is nothing, or no tables."""
        found = self.best(self.policy, ties=True)
        if found is None:
            return None
        return DispatchChoice(self, found.gpus, self.shares([found.gpus])[0])

    @cached_property
    def best_alone(self) -> tuple[int, ...]:
        """The best each request could get if it were the only one, kB/s (for ``"max_min"``)."""
        if self.tables is None:
            raise InputError("objective: max_min needs a model with tables")
        found = [self.best(one.policy, one.gpus) for one in self.requests]
        return tuple(0 if choice is None else choice.value for choice in found)

    def worth(self, chosen: Sequence[Sequence[int]]) -> int:
        """Objective of a choice in its natural sign: kB/s, or parts of `RATIO` for max_min."""
        values = [one.value for one in self.shares(chosen)]
        if self.objective == "sum" or len(values) == 1:
            return sum(values)
        return min(
            value * RATIO // best if best else RATIO
            for value, best in zip(values, self.best_alone, strict=True)
        )

    def evaluate(self, schedule: Schedule) -> int:
        """Objective of a schedule of `scheduled`: the negative bandwidth in kB/s."""
        chosen = self.chosen(schedule)
        self.check_sizes(chosen)
        return -self.worth(chosen)

    def check_sizes(self, chosen: Sequence[Sequence[int]]) -> None:
        """Raise an `InputError` unless every request gets its number of GPUs."""
        for request, gpus in zip(self.requests, chosen, strict=True):
            if len(gpus) != request.gpus:
                raise InputError(
                    f"the schedule gives request {request.name!r} {len(gpus)} GPUs, "
                    f"it requested {request.gpus}"
                )

    def value(self, schedule: Schedule) -> int:
        """Bandwidth in kB/s, the natural sign of `evaluate`."""
        return -self.evaluate(schedule)

    def describe(self, objective: int | None) -> str:
        """``337.17 GB/s``; relative values in percent; ``none`` if nothing was found."""
        if objective is None:
            return "none"
        if self.objective == "max_min" and len(self.requests) > 1:
            return f"{-objective / RATIO:.2%} of the best alone"
        return shown(-objective)

    def lower_bound(self) -> int:
        """No choice is better: for each request its best host, or the best pattern of its size."""
        if len(self.requests) > 1 and self.objective == "max_min":
            return -RATIO
        return -sum(self._most(request.gpus) for request in self.requests)

    def _most(self, k: int) -> int:
        tables = self.tables
        if k <= 1:
            return 0
        if tables is None:
            return MOST
        patterns, network = tables.automaton.patterns, tables.network
        several = network[(patterns.sum(axis=1) == k) & (patterns[:, 0] < k)]
        rows = range(self.cluster.n_hosts)
        on_one = [tables.best(h, int(self.state.masks[h]), k) for h in rows]
        most: int = max([0, *several.tolist(), *on_one])
        return most

    def infeasibility(self) -> str:
        """Why no choice exists, if that is easy to see; else ``""``."""
        for request in self.requests:
            reason = impossible(self.state, request.policy, request.gpus)
            if reason:
                return reason if len(self.requests) == 1 else f"{request.name}: {reason}"
        return ""

    # schedules

    @property
    def job_names(self) -> tuple[str, ...]:
        """Names of the running jobs, then of the requests."""
        running = (job.name for job in self.state.jobs)
        return (*running, *(request.name for request in self.requests))

    def graph(self) -> Schedule:
        """The running jobs: one operation each, which holds all its GPUs."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        return self._snapshot([])

    def scheduled(self, answer: GpuSets) -> Schedule:
        """A snapshot of the cluster with the choice made.

        Raises
        ------
        InputError
            A GPU that is not free or given twice, another number of them, a policy broken.
        """
        faults = self.faults(answer.gpus)
        if faults:
            raise InputError(faults[0])
        sequences: list[list[int]] = [[] for _ in range(self.cluster.n_gpus)]
        held = [*(job.gpus for job in self.state.jobs), *answer.gpus]
        for i, gpus in enumerate(held):
            for gpu in gpus:
                sequences[gpu].append(i)
        found = self._snapshot(answer.gpus)
        return found.with_orders(Csr.of(sequences), np.zeros(len(held), np.int64))

    def _snapshot(self, chosen: Sequence[Sequence[int]]) -> Schedule:
        jobs = self.state.jobs
        n = len(jobs) + len(chosen)
        return Schedule(
            name=self.name,
            time_unit="s",
            resources=self.cluster.resources,
            duration=np.ones(n, np.int64),
            op_resources=Csr.of([*(job.gpus for job in jobs), *(sorted(c) for c in chosen)]),
            job=np.arange(n),
            kind=np.array(["running"] * len(jobs) + ["dispatch"] * len(chosen), dtype=np.str_),
        )

    def chosen(self, schedule: Schedule) -> list[list[int]]:
        """GPUs of every request in a schedule of `scheduled`.

        Raises
        ------
        InputError
            The schedule is not of this problem.
        """
        if not isinstance(schedule, Schedule):
            raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
        if schedule.resources != self.cluster.resources:
            raise InputError("the schedule belongs to another cluster")
        rows = schedule.op_resources.to_lists()
        n = len(self.state.jobs)
        kinds = schedule.kind.tolist()
        running = [sorted(job.gpus) for job in self.state.jobs]
        if kinds != ["running"] * n + ["dispatch"] * len(self.requests) or (
            [sorted(row) for row in rows[:n]] != running
        ):
            raise InputError(
                f"the schedule belongs to another instance: expected the {n} running jobs and "
                f"{len(self.requests)} requests"
            )
        return [sorted(row) for row in rows[n:]]

    def answer(self, schedule: Schedule) -> GpuSets:
        """The inverse of `scheduled`, for a start to begin with."""
        chosen = self.chosen(schedule)
        faults = self.faults(chosen)
        if faults:
            raise InputError(faults[0])
        return GpuSets.of(chosen)

    def check(self, schedule: Schedule) -> list[str]:
        """What the verifier cannot know, a sentence each: GPUs not free, |S| != k, a policy."""
        return self.faults(self.chosen(schedule))

    def faults(self, chosen: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with a choice, a sentence each; see `check`."""
        return faults_of(self.state, self.requests, chosen)

    def choice(self, schedule: Schedule | None = None) -> DispatchChoice:
        """The only request's answer, to be read and explained; solves by `counts` without one.

        Raises
        ------
        InputError
            Several requests, a schedule of another problem, or no choice at all.
        """
        self.single("choice")
        if schedule is None:
            found = self._best_choice()
            if found is None:
                reason = self.infeasibility() or "the model has no tables; solve it first"
                raise InputError(f"choice: there is none: {reason}")
            return found
        chosen = self.chosen(schedule)
        self.check_sizes(chosen)
        return DispatchChoice(self, tuple(chosen[0]), self.shares(chosen)[0])

    # identity and files

    @cached_property
    def sha256(self) -> str:
        """Hash of the state, the request and what the model says of it."""
        text = repr((
            self.cluster.sha256, self.state.free, self.state.down,
            [(job.gpus, job.demand, job.name) for job in self.state.jobs],
            self.requests, self.traffic, self.seed, self.tolerance,
            self.on_unmeasured, self.max_regret, self.objective, self.model.sha256,
        ))  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> GpuPlacement:
        """Read a document ``optsched.subset/1``; `InputError` names path, rule and value."""
        from optsched.bandwidth.placement.document import read

        return read(path)

    def write(
        self, path: str | os.PathLike[str], model_file: str | os.PathLike[str] | None = None
    ) -> None:
        """Write a document ``optsched.subset/1``, all of it or nothing.

        Parameters
        ----------
        path
            The file.
        model_file
            The file beside it that holds the model: then only its name and hash are written.
        """
        from optsched.bandwidth.placement.document import to_json
        from optsched.io.files import write_atomic

        write_atomic(path, to_json(self, model_file))

    def __repr__(self) -> str:
        sizes = ", ".join(str(request.gpus) for request in self.requests)
        return f"<GpuPlacement {self.name!r}: {sizes} of {len(self.state.free)} free GPUs>"


@dataclass(frozen=True, eq=False)
class DispatchChoice:
    """The GPUs of the only request of a `GpuPlacement`; bandwidths in kB/s.

    Parameters
    ----------
    problem
        What was asked.
    gpus
        Global numbers, ascending.
    share
        What they get, and which job limits them.
    """

    problem: GpuPlacement
    gpus: tuple[int, ...]
    share: Share

    @property
    def bandwidth(self) -> int:
        """B(S, traffic)."""
        return self.share.value

    @property
    def standalone(self) -> int:
        """B(S) without other jobs."""
        return self.share.standalone

    @property
    def counts(self) -> dict[str, int]:
        """Host to number of GPUs."""
        cluster = self.problem.cluster
        found: dict[str, int] = {}
        for gpu in self.gpus:
            host = cluster.hosts[int(cluster.host_of[gpu])].name
            found[host] = found.get(host, 0) + 1
        return found

    @property
    def rank_order(self) -> tuple[int, ...]:
        """The GPUs by rank: hosts contiguous, domains grouped."""
        return rank_order(self.problem.cluster, self.gpus)

    def hostfile(self) -> str:
        """``host slots=n`` a line, in rank order."""
        return hostfile(self.problem.cluster, self.gpus)

    def visible_devices(self) -> dict[str, str]:
        """Machine to its ``CUDA_VISIBLE_DEVICES``, in rank order; none where ids are unknown."""
        state, found = self.problem.state, visible_devices(self.problem.cluster, self.gpus)
        return {
            name: ids for name, ids in found.items() if name not in state.unknown
            or ids.count(",") + 1 == len(state.cluster.machine(name))
        }  # fmt: skip

    @cached_property
    def victims(self) -> dict[str, int]:
        """What running jobs lose, for those that lose anything: their share before less after."""
        problem = self.problem
        return victims(problem.judged_by, problem.state, problem.demands, self.gpus)

    @cached_property
    def regret(self) -> int | None:
        """What may be lost at most by not knowing better; 0 if all is measured, None if unknown."""
        problem = self.problem
        return regret(
            problem.model, problem.state, self.gpus, problem.policy,
            problem.traffic, problem.seed,
        )  # fmt: skip

    @cached_property
    def price_of_policy(self) -> int | None:
        """The best bandwidth without the policy less the best with it; None if it is unknown.

        It is unknown without tables, as on large clusters.
        """
        problem = self.problem
        if problem.policy.is_free:
            return 0
        free, ruled = problem.best(None), problem.best(problem.policy)
        if free is None or ruled is None or not (free.exact and ruled.exact):
            return None
        return free.value - ruled.value  # type: ignore[no-any-return]

    def explain(self) -> str:
        """What limits this choice, its best alternatives, victims, and the price of the policy."""
        from optsched.bandwidth.placement.explain import explained

        return explained(self)


__all__ = ["DispatchChoice", "GpuPlacement", "GpuSets", "Request"]
