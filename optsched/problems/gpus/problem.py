"""GPU placement: which k of the free GPUs give a job the most bandwidth beside the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from optsched.bandwidth.contention import (
    Contention,
    Share,
    Traffic,
    check_traffic,
    demands,
    share,
)
from optsched.bandwidth.ends import End, measured_only
from optsched.bandwidth.feasibility import impossible
from optsched.bandwidth.model import BandwidthModel
from optsched.bandwidth.policy import Policy, check_rules, share_of
from optsched.bandwidth.rates import MOST, shown
from optsched.bandwidth.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.values import integer, label, one_of
from optsched.model.schedule import Problem, Rows, Schedule

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.tables import CountTables
    from optsched.problems.gpus.choice import DispatchChoice

ON_UNMEASURED: Final = ("predict", "robust", "measured")
OBJECTIVES: Final = ("sum", "max_min")
RATIO: Final = 10**9
"""The objective ``"max_min"`` counts in parts of this."""


class Request(NamedTuple):
    """One of several requests that are decided together."""

    name: str
    gpus: int
    policy: Policy = Policy()


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
    """Of the free GPUs choose k with the highest bandwidth under everybody's traffic.

    Minimised is the negative bandwidth in kB/s. Among choices that are within `tolerance` of the
    best, wanted are, one after the other: most hosts left entirely free; the heaviest pairs in
    what is left; the highest bandwidths of all that is left; the highest bandwidth; the lowest ids.

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
    contention
        How jobs share.
    traffic, seed
        Demands of the running jobs, see `optsched.bandwidth.contention.demands`.
    tolerance
        Share of the best bandwidth that may be lost for a better rest, to the millionth.
    on_unmeasured
        What to do where the model only predicts: ``"predict"`` believes it, ``"robust"``
        maximises what is certain, ``"measured"`` takes only what is known exactly.
    max_regret
        If what could be lost at most by believing is a larger share than this of the choice's
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
    """

    state: ClusterState
    model: BandwidthModel
    requests: tuple[Request, ...]
    contention: Contention
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
        contention: Contention | None = None,
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
            raise InputError("state, model: are of different clusters")
        if not isinstance(requests, (list, tuple)):
            raise InputError(f"requests: expected a list of Requests, got {requests!r:.60}")
        check_rules(policy, contention)
        if (gpus is None) == (not requests):
            raise InputError("gpus, requests: expected one of them")
        if requests and policy is not None:
            raise InputError("policy: of several requests each has its own")
        wanted = tuple(requests) or (Request("job", gpus, policy or Policy()),)  # type: ignore[arg-type]
        rule = contention or Contention()
        if rule.pooled:
            state = state.pooled()
        _check_requests(state, wanted)
        values: dict[str, Any] = {
            "state": state, "model": model, "requests": wanted, "contention": rule,
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
        """Whose GPUs they are."""
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
        model = End(self.model, "high") if self.is_robust else self.model
        return demands(model, self.state, self.traffic, self.seed, self.contention.unit)

    @cached_property
    def is_robust(self) -> bool:
        """Whether lower ends of intervals are maximised: asked for, or the regret is too high."""
        if self.on_unmeasured == "robust":
            return True
        if self.max_regret is None or self.on_unmeasured == "measured":
            return False
        from optsched.problems.gpus.choice import choice_of_problem

        trusting = self.changed(max_regret=None)
        choice = choice_of_problem(trusting)
        if choice is None or choice.regret is None:
            return False
        return choice.regret > self.max_regret * choice.bandwidth

    @cached_property
    def judged_by(self) -> BandwidthModel:
        """The model whose bandwidths count: the given one, or its lower ends."""
        return End(self.model, "low") if self.is_robust else self.model

    @cached_property
    def tables(self) -> CountTables | None:
        """Tables for kernels; None if the model has none."""
        if self.on_unmeasured == "measured":
            return measured_only(self.model)
        return self.judged_by.tables()

    def changed(self, **fields: Any) -> GpuPlacement:
        """The same problem with other fields."""
        kept: dict[str, Any] = {
            key: getattr(self, key)
            for key in (
                "requests", "contention", "traffic", "seed", "tolerance", "on_unmeasured",
                "max_regret", "objective", "name",
            )
        }  # fmt: skip
        unknown = set(fields) - {*kept, "state", "model", "gpus", "policy"}
        if unknown:
            raise InputError(f"changed: there is no field {min(unknown)!r:.60}")
        kept.update(fields)
        state = kept.pop("state", self.state)
        model = kept.pop("model", self.model)
        kept["contention"] = replace(kept["contention"], pooled=False)  # the state is already
        if "gpus" in kept:
            kept.pop("requests")
        return GpuPlacement(state, model, **kept)

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
            state, wanted = self.state, self.demands
            for other, theirs in enumerate(chosen):
                if other != r:
                    name = f"request {self.requests[other].name}"
                    state = state.beside([Job(name, tuple(theirs))])
                    wanted = (*wanted, self.judged_by.of(theirs))
            found.append(share(self.judged_by, state, gpus, wanted, self.contention))
        return found

    @cached_property
    def best_alone(self) -> tuple[int, ...]:
        """The best each request could get if it were the only one, kB/s (for ``"max_min"``)."""
        from optsched.bandwidth.ask import ask

        if self.tables is None:
            raise InputError("objective: max_min needs a model with tables")
        found = []
        for request in self.requests:
            choice = ask(
                self.tables, self.state.masks, self.state.held, self.demands, request.gpus,
                request.policy, self.contention,
            )  # fmt: skip
            found.append(0 if choice is None else choice.value)
        return tuple(found)

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
        """Raise an `InputError` unless every request gets as many GPUs as it asks."""
        for request, gpus in zip(self.requests, chosen, strict=True):
            if len(gpus) != request.gpus:
                raise InputError(
                    f"the schedule gives request {request.name!r} {len(gpus)} GPUs, "
                    f"it asks {request.gpus}"
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
        return found.with_orders(Rows.of(sequences), np.zeros(len(held), np.int64))

    def _snapshot(self, chosen: Sequence[Sequence[int]]) -> Schedule:
        jobs = self.state.jobs
        n = len(jobs) + len(chosen)
        return Schedule(
            name=self.name,
            time_unit="s",
            resources=self.cluster.resources,
            duration=np.ones(n, np.int64),
            op_resources=Rows.of([*(job.gpus for job in jobs), *(sorted(c) for c in chosen)]),
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
        cluster, free = self.cluster, set(self.state.free)
        if len(chosen) != len(self.requests):
            return [f"expected GPUs for {len(self.requests)} requests, got {len(chosen)}"]
        found: list[str] = []
        owner: dict[int, str] = {}
        for request, gpus in zip(self.requests, chosen, strict=True):
            who = f"request {request.name!r}"
            if len(gpus) != request.gpus:
                found.append(f"{who} gets {len(gpus)} GPUs, it asks {request.gpus}")
            counts: dict[int, int] = {}
            for gpu in gpus:
                if not 0 <= gpu < cluster.n_gpus:
                    found.append(f"{who} gets GPU {gpu}, the cluster has 0..{cluster.n_gpus - 1}")
                    continue
                if gpu not in free:
                    found.append(f"{who} gets GPU {cluster.gpu_name(gpu)}, which is not free")
                if gpu in owner:
                    found.append(f"GPU {cluster.gpu_name(gpu)} goes to {owner[gpu]} and to {who}")
                owner[gpu] = who
                host = int(cluster.host_of[gpu])
                counts[host] = counts.get(host, 0) + 1
            broken = request.policy.broken_by(cluster, counts)
            if broken:
                found.append(f"{who} breaks its policy: {broken}")
        return found

    def choice(self, schedule: Schedule | None = None) -> DispatchChoice:
        """The only request's answer, to be read and explained; solves by `counts` without one.

        Raises
        ------
        InputError
            Several requests, a schedule of another problem, or no choice at all.
        """
        from optsched.problems.gpus.choice import choice_of

        return choice_of(self, schedule)

    # identity and files

    @cached_property
    def sha256(self) -> str:
        """Hash of the state, the request and what the model says of it."""
        text = repr((
            self.cluster.sha256, self.state.free, self.state.down,
            [(job.gpus, job.demand, job.name) for job in self.state.jobs],
            self.requests, self.contention, self.traffic, self.seed, self.tolerance,
            self.on_unmeasured, self.max_regret, self.objective, self.model.sha256,
        ))  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> GpuPlacement:
        """Read a document ``optsched.subset/1``; `InputError` names path, rule and value."""
        from optsched.problems.gpus.document import read

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
        from optsched.io.files import write_atomic
        from optsched.problems.gpus.document import to_json

        write_atomic(path, to_json(self, model_file))

    def __repr__(self) -> str:
        wanted = ", ".join(str(request.gpus) for request in self.requests)
        return f"<GpuPlacement {self.name!r}: {wanted} of {len(self.state.free)} free GPUs>"


def _check_requests(state: ClusterState, requests: Sequence[Request]) -> None:
    for r, request in enumerate(requests):
        if not isinstance(request, Request):
            raise InputError(f"requests[{r}]: expected a Request, got {request!r:.60}")
    names = [request.name for request in requests]
    running = {job.name for job in state.jobs}
    total = 0
    for r, request in enumerate(requests):
        place = "gpus" if len(requests) == 1 else f"requests[{r}].gpus"
        label("request", request.name)
        if not request.name or names.count(request.name) > 1:
            raise InputError(f"requests: expected distinct names, got {request.name!r:.60} again")
        if len(requests) > 1 and request.name in running:
            raise InputError(f"requests[{r}].name: a job {request.name!r:.60} runs already")
        k = integer(place, request.gpus, 1, 2**31)
        total += k
        if total > len(state.free):
            hosts = int((state.room > 0).sum())
            raise InputError(
                f"{place}: asks {total}, free {len(state.free)} on {hosts} host{'s' * (hosts != 1)}"
            )
        if not isinstance(request.policy, Policy):
            raise InputError(f"policy: expected a Policy, got {request.policy!r:.60}")
        request.policy.check(state.cluster)


__all__ = ["GpuPlacement", "GpuSets", "Request"]
