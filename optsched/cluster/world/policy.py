"""What a policy sees, what it answers, what it offers, and what can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterView:
    """Show the cluster at one instant, read-only; position i is the i-th active job.

    Active jobs are those that have arrived, are visible (`Group.max_concurrent`) and have not
    ended, by submit time, then id. Times in the workload's unit; work in `WORK` parts of a unit of
    time on one GPU; a job at size g does ``rate(g)`` of it per unit of time. It is valid until the
    policy has answered: columns are read from the running simulation when they are first used.

    Examples
    --------
    >>> from optsched.cluster import Decision, Job, Nodes, simulate
    >>> class Smallest:
    ...     name, clairvoyant = "smallest", False
    ...
    ...     def decide(self, view):
    ...         return Decision(view.size[view.size_ptr[:-1]])  # each job at its smallest size
    >>> simulate([Job(name="a", sizes=(2, 4), work=4 * 10**8)], Smallest(), Nodes(1)).jct.tolist()
    [200]
    """

    time: int
    job: IntArray
    """Number of every active job in the workload, ascending; the other columns go with it."""
    gpus: IntArray
    """GPUs held now; 0 for a pending job. A running zero-slot task holds 0: see `running`."""
    running: BoolArray
    submit: IntArray
    first_start: IntArray
    """-1 before the first start."""
    entered: IntArray
    """When the job last became pending or last started."""
    attained: IntArray
    """GPU-time received."""
    done: IntArray
    """Work done."""
    remaining: IntArray
    """Work left: true for clairvoyant policies, else by the estimate (at least 1)."""
    passes: IntArray
    """Passes completed."""
    pass_work: IntArray
    at_pass_end: BoolArray
    """Whether the job is pending, or ended a pass at this very instant: its quota may change now
    without losing anything."""
    starts: IntArray
    """How often the job was started or resized; restarts are all but the first."""
    size_ptr: IntArray
    size: IntArray
    """Allowed sizes of job i: ``size[size_ptr[i]:size_ptr[i + 1]]``, ascending, without 0."""
    rate: IntArray
    """Speed at each of them, without contention."""
    priority: IntArray
    weight: FloatArray
    group: IntArray
    template: IntArray
    preemptible: BoolArray
    restart_cost: IntArray
    observed_ptr: IntArray
    observed: FloatArray
    """Uncertainty after every completed pass of job i: ``observed[ptr[i]:ptr[i + 1]]``."""
    free: IntArray
    """Free GPUs of every node (0 for one that is drained or removed)."""
    capacity: IntArray
    """All its GPUs (likewise)."""
    held_ptr: IntArray
    held_node: IntArray
    held_count: IntArray
    """Where job i runs: so many GPUs on these nodes, ascending; a zero-slot task has one row with
    count 0."""
    workload: Workload
    """For what never changes (names, groups, templates, uncertainty targets)."""
    settings: Settings
    node_type: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Type of every node's GPUs: its place among the distinct `Nodes.types`; empty: alike;
    the jobs' speeds by name are ``workload.types`` and ``workload.speeds``."""
    nodes: Nodes | None = None
    """All nodes, also those that take no work."""
    draining: BoolArray = field(default_factory=lambda: np.empty(0, bool))
    """Whether the job holds GPUs of a node that takes no work; empty only in views made by hand."""
    zero_free: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Free zero-slot units of every node (0 likewise); an empty array: no limit."""
    finished: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """When each job of the *workload* ended, by its number; -1: it has not."""
    partner: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Position of the job that shares the GPUs of job i, -1: none; an empty array: no job does."""


@dataclass(frozen=True, eq=False)
class Decision:
    """Set the GPUs of every active job, aligned with the view; 0: it does not run.

    A zero-slot task runs if its quota is -1 (it holds no GPU, but a node's zero-slot unit). A
    running job whose quota, nodes and partner stay the same goes on undisturbed.

    Examples
    --------
    >>> import numpy as np
    >>> from optsched.cluster import Decision
    >>> Decision(np.array([4, 0]), nodes={0: {1: 4}}, wake_at=600).wake_at
    600
    """

    quota: IntArray
    nodes: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Position of an active job -> {node: GPUs}; jobs that are not named are placed best-fit,
    and running jobs stay where they are."""
    wake_at: int | None = None
    """Decide again then at the latest; later than now. For what no event announces, such as one
    job's remaining work falling below another's."""
    order: IntArray | None = None
    """Distinct positions in the order in which they are placed, others behind them; by position if
    not given."""
    best_effort: bool = False
    """Jobs that cannot be placed stay pending (one that was to be resized is preempted) instead of
    an error."""
    share: Mapping[int, int] = field(default_factory=dict)
    """Position -> position of the job whose GPUs it shares: one that runs on as many, and shares
    them with no other job (packing)."""


@runtime_checkable
class Policy(Protocol):
    """Decide at every event which jobs run on how many GPUs.

    It may offer ``compiled(workload, nodes, settings) -> Log``: the same decisions in compiled
    code; ``notes(workload, nodes)``: sentences for `Run.notes`; and ``honours_max_slots = True`` if
    it keeps groups to their `Group.max_slots`: `simulate` refuses such groups otherwise.

    Examples
    --------
    >>> from optsched.cluster import Policy, policies
    >>> isinstance(policies.get("fifo"), Policy)
    True
    """

    name: str
    clairvoyant: bool

    def decide(self, view: ClusterView) -> Decision:
        """Pure: the view is not changed, and nothing is remembered that the view does not hold."""
        ...


class PolicyError(InputError):
    """Report a decision that breaks a rule; the message names the job and the rule.

    Examples
    --------
    >>> from optsched.cluster import Decision, Job, Nodes, PolicyError, simulate
    >>> class Greedy:
    ...     name, clairvoyant = "greedy", False
    ...
    ...     def decide(self, view):
    ...         return Decision(view.gpus * 0 + 3)
    >>> try:
    ...     simulate([Job(name="a", sizes=(2,), work=10**6)], Greedy(), Nodes(1))
    ... except PolicyError as error:
    ...     print(error)
    policy "greedy" at time 0: job "a": quota 3 is not one of its sizes (2) or 0
    """


class Stalled(InputError):
    """Report jobs that are pending for ever.

    Nothing runs and no event is left that could change it; or those that are started are always
    stopped before they get anywhere.

    Examples
    --------
    >>> from optsched.cluster import Decision, Job, Nodes, Stalled, simulate
    >>> class Idle:
    ...     name, clairvoyant = "idle", False
    ...
    ...     def decide(self, view):
    ...         return Decision(view.gpus)
    >>> try:
    ...     simulate([Job(name="a", sizes=(2,), work=10**6)], Idle(), Nodes(1))
    ... except Stalled as error:
    ...     print(str(error).partition(",")[0])
    policy 'idle' starts none of 1 pending jobs at time 0
    """


class Why(StrEnum):
    """Name the kinds of reasons why a job or a task is waiting.

    Examples
    --------
    >>> optsched.cluster.Why.ROOM.value
    'room'
    """

    NEVER = "never"  # it does not fit the cluster even if nothing else runs
    SHARE = "share"  # what its group may have is used up, or smaller than it
    ROOM = "room"  # too little is free
    GANG = "gang"  # enough is free in all, but not on the nodes that one gang needs
    RELEASE = "release"  # room is made for it: it starts when what is released has stopped
    ORDER = "order"  # it fits, but others go first


class Reason(NamedTuple):
    """Explain why a job is waiting: a word for programs, a sentence for people.

    Examples
    --------
    >>> from optsched.cluster import Reason, Why
    >>> Reason(Why.ROOM, "needs 8 GPUs, 4 are free").why.value
    'room'
    """

    why: Why
    text: str


def of_free_gpus(least: int, free: int, total: int, policy: str) -> Reason:
    """Why a job of smallest size `least` is waiting, by the free GPUs and all that take work."""
    if least == 0:
        return Reason(Why.ROOM, "needs a zero-slot unit of a node")
    needs = f"needs {least} GPU{'s' * (least != 1)}"
    if least > total:
        return Reason(Why.NEVER, f"{needs}, the nodes that take work have {total}")
    if least > free:
        return Reason(Why.ROOM, f"{needs}, {free} are free")
    return Reason(Why.ORDER, f"{needs}, {free} are free, but policy {policy:.60} keeps it back")
