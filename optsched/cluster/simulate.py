"""`simulate`: read the arguments, run the policy compiled or ask it, return a `Run`."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from optsched.errors import InputError
from optsched.io.values import format_value, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.job import Job
    from optsched.cluster.workload.nodes import NodeChange, NodeFailures, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import Policy
    from optsched.cluster.world.settings import Settings
    from optsched.cluster.world.start import Start

ENGINES: Final = ("auto", "generic")


def simulate(
    workload: Workload | Iterable[Job],
    policy: Policy | str,
    nodes: Nodes,
    *,
    restart_cost: int = 0,
    resize: Literal["pass", "anytime"] = "pass",
    checkpoint: Literal["immediate", "pass"] = "immediate",
    round: int = 0,
    changes: Sequence[NodeChange] | NodeFailures = (),
    seed: int = 0,
    start: Start | None = None,
    engine: Literal["auto", "generic"] = "auto",
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Run:
    """Replay jobs on nodes under a policy, by events.

    Parameters
    ----------
    workload
        Jobs as a `Workload`, or one by one.
    policy
        An object with `decide` (see `optsched.cluster.Policy`), or a name of
        `optsched.cluster.policies`.
    nodes
        The machines.
    restart_cost, resize, checkpoint, round, changes, seed, start
        See `optsched.cluster.Settings`. As `changes` also `NodeFailures`, to the end of
        the last job.
    engine
        ``"auto"`` takes the policy's `compiled` simulation where there is one, ``"generic"`` always
        calls the policy itself: the logs are equal, compiled ones are faster.
    on_progress
        Called now and then with the time, the jobs that have ended, and all jobs (compiled:
        once, at the end). Ctrl-C in the generic engine returns what has happened until then; jobs
        that did not end have ``log.finished`` -1.

    Returns
    -------
    Run
        The log, metrics and the history as a schedule.

    Raises
    ------
    InputError
        A wrong argument, a job that is larger than the cluster or its group's `max_slots`, a
        `max_slots` that the policy does not honour, or times beyond 2^53.
    PolicyError
        A decision that breaks a rule, with the job.
    Stalled
        Jobs are pending for ever; the message lists them. Or the policy starts and stops them for
        ever before they do any work.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, simulate
    >>> queue = [Job(name=name, sizes=(8,), work=8 * 10**8) for name in "ab"]
    >>> simulate(queue, "sjf", Nodes(1, gpus=8), restart_cost=30).metrics.jct_mean
    150.0
    """
    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.nodes import NodeFailures, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.build import check_fits
    from optsched.cluster.world.settings import Settings

    fails = isinstance(changes, NodeFailures)
    settings = Settings(
        restart_cost=restart_cost, resize=resize, checkpoint=checkpoint, round=round, seed=seed,
        start=start, changes=() if fails else changes,  # type: ignore[arg-type]
    )  # fmt: skip
    one_of("engine", engine, ENGINES)
    if not isinstance(nodes, Nodes):
        raise InputError(
            f"nodes: expected Nodes such as Nodes(16, gpus=8), got {format_value(nodes)}"
        )
    jobs = workload if isinstance(workload, Workload) else Workload.of(workload, seed=settings.seed)
    chosen = chosen_policy(policy)
    check_fits(jobs, nodes, settings)
    _check_groups(jobs, chosen)

    run = partial(_log, jobs, chosen, nodes, on_progress, engine == "auto")
    if fails:
        settings, log = _failing(changes, jobs, nodes, settings, run)
    else:
        log = run(settings)
    sentences = getattr(chosen, "notes", None)
    notes = tuple(sentences(jobs, nodes)) if callable(sentences) else ()
    options, reasons = policy_options(chosen), getattr(chosen, "reasons", None)
    return Run(jobs, nodes, settings, chosen.name, options, log, notes=notes, reasons=reasons)


class Case(NamedTuple):
    """Arguments of one simulation of a sweep, which a process can be sent."""

    workload: Workload
    policy: Policy | str
    nodes: Nodes
    settings: dict[str, Any]

    def run(self) -> tuple[Run, float]:
        """Simulate, the policy as it was given; return the seconds without compiling, too."""
        from optsched.kernels.compile import Entry

        since, compiled = time.monotonic(), Entry.seconds_compiling
        run = simulate(self.workload, copy.deepcopy(self.policy), self.nodes, **self.settings)
        return run, time.monotonic() - since - (Entry.seconds_compiling - compiled)


def _log(
    jobs: Workload, policy: Policy, nodes: Nodes,
    on_progress: Callable[[int, int, int], None] | None, compiled: bool, settings: Settings,
) -> Log:  # fmt: skip
    """Run the policy, in compiled code where there is one."""
    from optsched.cluster.world.engine import simulate_generic

    simulation = getattr(policy, "compiled", None)
    if not callable(simulation) or not compiled:
        return simulate_generic(jobs, policy, nodes, settings, on_progress).log
    log: Log = simulation(jobs, nodes, settings)
    if on_progress is not None:
        on_progress(int(log.finished.max()), int((log.finished >= 0).sum()), len(jobs))
    return log


def _failing(
    failures: Any, jobs: Workload, nodes: Nodes, settings: Settings, run: Callable[[Settings], Log]
) -> tuple[Settings, Log]:
    """A run with failures to the end of the last job, which is not known beforehand."""
    from optsched.cluster.workload.job import WORK

    until = 2 * int(jobs.submit[-1] + jobs.work.sum(dtype=float) / WORK / max(nodes.total, 1))
    while True:
        settings = replace(settings, changes=failures.changes(nodes, until))
        log = run(settings)
        if log.finished.min() < 0 or log.finished.max() <= until:  # below 0: after Ctrl-C
            return settings, log
        until = 2 * int(log.finished.max())  # the failures before stay the same


def chosen_policy(policy: Any) -> Policy:
    """The policy of this name, or this object if it is one."""
    if isinstance(policy, str):
        from optsched.cluster.policies import get

        return get(policy)
    given, name = format_value(policy), getattr(policy, "name", None)
    if isinstance(policy, type) or not callable(getattr(policy, "decide", None)):
        raise InputError(
            f"policy: expected a name or an object with the method `decide`, got {given}"
        )
    if not isinstance(name, str):
        raise InputError(f"policy: expected a text as its `name`, got {format_value(name)}")
    if not isinstance(getattr(policy, "clairvoyant", None), bool):
        raise InputError(f"policy {format_value(name)}: its `clairvoyant` has to be True or False")
    found: Policy = policy
    return found


def _check_groups(workload: Workload, policy: Policy) -> None:
    """Refuse limits of groups that the policy would ignore, or under which a job never runs."""
    smallest = workload.size[workload.size_ptr[:-1]]
    for g, group in enumerate(workload.groups):
        if group.max_slots is None:
            continue
        place, name = f"groups[{g}].max_slots", format_value(group.name)
        if getattr(policy, "honours_max_slots", False) is not True:
            raise InputError(
                f"{place}: policy {format_value(policy.name)} would ignore that group {name} has "
                f"at most {group.max_slots}; take a policy that honours it, such as fair_share, or "
                "leave max_slots out"
            )
        if group.name == "":
            raise InputError(
                f"{place}: {group.max_slots} for jobs without a group, each of which is one of its "
                "own; name a group"
            )
        wide = (workload.group == g) & (smallest > group.max_slots)
        for j in wide.nonzero()[0][:1].tolist():
            raise InputError(
                f"{place}: group {name} has at most {group.max_slots}, but its job "
                f"{format_value(workload.names[j])} needs {smallest[j]} GPUs and could never run; "
                "raise it"
            )


def policy_options(policy: Policy) -> dict[str, Any]:
    """Values of the options that the policy names."""
    names = getattr(policy, "options", ())
    return {key: getattr(policy, key) for key in sorted(names) if hasattr(policy, key)}
