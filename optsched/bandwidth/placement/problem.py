"""GPU placement: which k of the free GPUs give a job the most bandwidth beside the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optsched.bandwidth.models.contention import Share, Traffic, check_traffic, demands, share
from optsched.bandwidth.models.model import BandwidthModel
from optsched.bandwidth.search.what_if import regret, victims
from optsched.bandwidth.topology.feasibility import impossible
from optsched.bandwidth.topology.policy import Policy, check_policy
from optsched.bandwidth.topology.ranks import hostfile, rank_order, visible_devices
from optsched.bandwidth.topology.rates import MOST, rate_text
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, label
from optsched.model.schedule import Csr, Problem, Schedule

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.bandwidth.models.tables import CountTables
    from optsched.bandwidth.search.by_counts import Answer
    from optsched.bandwidth.topology.cluster import Cluster


@dataclass(frozen=True, init=False, eq=False, repr=False)
class GpuPlacement(Problem):
    """Of the free GPUs choose k with the highest bandwidth beside the running jobs.

    Minimised is the negative bandwidth in kB/s. Among the best choices are preferred, one after
    the other: the fewest domains, from the top level down; the fewest hosts; most hosts left
    entirely free; the heaviest pairs, then the highest bandwidths of the GPUs that stay free; the
    lowest ids.

    Parameters
    ----------
    state
        Free GPUs and running jobs.
    model
        Standalone bandwidths; of the same cluster.
    gpus
        k.
    policy
        Rules; by default everything is allowed.
    traffic, seed
        Demands of the running jobs, see `optsched.bandwidth.models.contention.demands`.
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
    gpus: int
    policy: Policy
    traffic: Traffic
    seed: int
    name: str

    def __init__(
        self,
        state: ClusterState,
        model: BandwidthModel,
        gpus: int,
        *,
        policy: Policy | None = None,
        traffic: Traffic = "given",
        seed: int = 0,
        name: str = "",
    ) -> None:
        if not isinstance(state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {state!r:.60}")
        if not isinstance(model, BandwidthModel):
            raise InputError(f"model: expected a BandwidthModel, got {model!r:.60}")
        if state.cluster is not model.cluster and state.cluster.sha256 != model.cluster.sha256:
            raise InputError("state, model: are of different clusters (use model.cluster)")
        rules = check_policy(policy, state.cluster)
        check_traffic(traffic)
        if integer("gpus", gpus, 1, 2**31) > len(state.free):
            hosts = int((state.room > 0).sum())
            raise Infeasible(
                f"gpus: requested {gpus}, free {len(state.free)} on {hosts} "
                f"host{'s' * (hosts != 1)}"
            )
        self.__dict__.update(
            state=state, model=model, gpus=int(gpus), policy=rules, traffic=traffic,
            seed=integer("seed", seed, 0, 2**31 - 1), name=label("name", name),
        )  # fmt: skip

    problem_kind: ClassVar[str] = "gpus"

    # what solvers read

    @property
    def objective_name(self) -> str:
        """``"bandwidth"``; the negative is minimised."""
        return "bandwidth"

    @property
    def n_operations(self) -> int:
        """Running jobs and the request."""
        return len(self.state.jobs) + 1

    @property
    def cluster(self) -> Cluster:
        """The cluster of the state and the model."""
        return self.state.cluster

    @property
    def k(self) -> int:
        """Number of GPUs."""
        return self.gpus

    @cached_property
    def demands(self) -> tuple[int, ...]:
        """kB/s of every running job."""
        return demands(self.model, self.state, self.traffic, self.seed)

    @cached_property
    def tables(self) -> CountTables | None:
        """Tables for kernels; None if the model has none."""
        return self.model.tables()

    def changed(self, **fields: Any) -> GpuPlacement:
        """Copy the problem with other fields."""
        kept = {one.name: getattr(self, one.name) for one in dataclass_fields(self)}
        if unknown := set(fields) - set(kept):
            raise InputError(f"changed: there is no field {min(unknown)!r:.60}")
        return GpuPlacement(**kept | fields)

    # judging

    def share(self, gpus: Sequence[int]) -> Share:
        """Bandwidth of a choice; `UnmeasuredPattern` where the model does not know it."""
        return share(self.model, self.state, gpus, self.demands)

    def best(self, policy: Policy | None, k: int | None = None) -> Answer | None:
        """The best answer by counts for k under a policy, ties open; None without tables."""
        from optsched.bandwidth.search.by_counts import best_by_counts

        size = self.k if k is None else k
        if self.tables is None or not 1 <= size <= len(self.state.free):
            return None
        return best_by_counts(self.tables, self.state, self.demands, size, policy)

    def evaluate(self, schedule: Schedule) -> int:
        """Objective of a schedule of `scheduled`: the negative bandwidth in kB/s."""
        return -self.choice(schedule).bandwidth

    def value(self, schedule: Schedule) -> int:
        """Bandwidth in kB/s, the natural sign of `evaluate`."""
        return -self.evaluate(schedule)

    def describe(self, objective: int | None) -> str:
        """``337.17 GB/s``; ``none`` if nothing was found."""
        return "none" if objective is None else rate_text(-objective)

    def lower_bound(self) -> int:
        """Negative bandwidth of the best single host, or of the best pattern of the size."""
        k, tables = self.k, self.tables
        if k <= 1:
            return 0
        if tables is None:
            return -MOST
        patterns, network = tables.automaton.patterns, tables.network
        several = network[(patterns.sum(axis=1) == k) & (patterns[:, 0] < k)]
        rows = range(self.cluster.n_hosts)
        on_one = [tables.best(h, int(self.state.masks[h]), k) for h in rows]
        return -int(max([0, *several.tolist(), *on_one]))

    def infeasibility(self) -> str:
        """Why no choice exists, if counting free GPUs shows it; else ``""``."""
        return impossible(self.state, self.policy, self.k)

    # schedules

    @property
    def job_names(self) -> tuple[str, ...]:
        """Names of the running jobs, then ``"job"``."""
        return (*(job.name for job in self.state.jobs), "job")

    def graph(self) -> Schedule:
        """The running jobs: one operation each, which holds all its GPUs."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        return self._snapshot(())

    def scheduled(self, answer: Sequence[int]) -> Schedule:
        """A snapshot of the cluster with the choice made."""
        if faults := self.faults(answer):
            raise InputError(faults[0])
        sequences: list[list[int]] = [[] for _ in range(self.cluster.n_gpus)]
        held = [*(job.gpus for job in self.state.jobs), answer]
        for i, gpus in enumerate(held):
            for gpu in gpus:
                sequences[gpu].append(i)
        found = self._snapshot(answer)
        return found.with_orders(Csr.of(sequences), np.zeros(len(held), np.int64))

    def _snapshot(self, chosen: Sequence[int]) -> Schedule:
        jobs, more = self.state.jobs, [sorted(chosen)] if chosen else []
        n = len(jobs) + len(more)
        return Schedule(
            name=self.name,
            time_unit="s",
            resources=self.cluster.resources,
            duration=np.ones(n, np.int64),
            op_resources=Csr.of([*(job.gpus for job in jobs), *more]),
            job=np.arange(n),
            kind=np.array(["running"] * len(jobs) + ["dispatch"] * len(more), dtype=np.str_),
        )

    def chosen(self, schedule: Schedule) -> tuple[int, ...]:
        """GPUs of the request in a schedule of `scheduled`; `InputError` for another problem's."""
        if not isinstance(schedule, Schedule):
            raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
        if schedule.resources != self.cluster.resources:
            raise InputError("the schedule belongs to another cluster")
        rows = [sorted(row) for row in schedule.op_resources.to_lists()]
        running, kinds = [sorted(job.gpus) for job in self.state.jobs], schedule.kind.tolist()
        if kinds != ["running"] * len(running) + ["dispatch"] or rows[:-1] != running:
            raise InputError(
                f"the schedule belongs to another instance: expected the {len(running)} running "
                "jobs and the request"
            )
        return tuple(rows[-1])

    def answer(self, schedule: Schedule) -> tuple[int, ...]:
        """The inverse of `scheduled`, for a start to begin with."""
        chosen = self.chosen(schedule)
        if faults := self.faults(chosen):
            raise InputError(faults[0])
        return chosen

    def check(self, schedule: Schedule) -> list[str]:
        """What the verifier cannot know, a sentence each: GPUs not free, ``|S| != k``, a policy."""
        return self.faults(self.chosen(schedule))

    def faults(self, chosen: Sequence[int]) -> list[str]:
        """What is wrong with a choice, a sentence each; see `check`."""
        cluster, free = self.cluster, set(self.state.free)
        found: list[str] = []
        if len(chosen) != self.k:
            found.append(f"the request gets {len(chosen)} GPUs, not {self.k}")
        if strange := [gpu for gpu in chosen if not 0 <= gpu < cluster.n_gpus]:
            return [*found, f"there is no GPU {strange[0]}, but 0..{cluster.n_gpus - 1}"]
        for gpu in dict.fromkeys(chosen):
            if gpu not in free:
                found.append(f"GPU {cluster.gpu_name(gpu)} is not free")
            if list(chosen).count(gpu) > 1:
                found.append(f"GPU {cluster.gpu_name(gpu)} is given twice")
        broken = self.policy.fault(self.state, set(chosen))
        return [*found, f"the choice breaks its policy: {broken}"] if broken else found

    def choice(self, schedule: Schedule) -> DispatchChoice:
        """The answer of a schedule, to be read and explained."""
        chosen = self.chosen(schedule)
        if len(chosen) != self.k:
            raise InputError(f"the schedule gives the request {len(chosen)} GPUs, not {self.k}")
        return DispatchChoice(self, chosen, self.share(chosen))

    # identity and files

    @cached_property
    def sha256(self) -> str:
        """Hash of the state, the request and what the model says of it."""
        text = repr((
            self.cluster.sha256, self.state.free, self.state.down,
            [(job.gpus, job.demand, job.name) for job in self.state.jobs],
            self.gpus, self.policy, self.traffic, self.seed, self.model.sha256,
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
        return f"<GpuPlacement {self.name!r}: {self.gpus} of {len(self.state.free)} free GPUs>"


@dataclass(frozen=True, eq=False)
class DispatchChoice:
    """The GPUs that a `GpuPlacement` gets; bandwidths in kB/s.

    Parameters
    ----------
    problem
        State, model and request.
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
        return victims(problem.model, problem.state, problem.demands, self.gpus)

    @cached_property
    def regret(self) -> int | None:
        """What may be lost at most by not knowing better; 0 if all is measured, None if unknown."""
        problem = self.problem
        return regret(
            problem.model, problem.state, self.gpus, problem.policy,
            problem.traffic, problem.seed,
        )  # fmt: skip

    def explain(self) -> str:
        """What limits this choice, its best alternatives, also without the policy, and victims."""
        from optsched.bandwidth.placement.explain import explained

        return explained(self)
