"""Kubernetes manifests with gang scheduling: a JSON ``List`` that kubectl accepts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.errors import InputError
from optsched.io.values import format_value, integer, label, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optsched.cluster.determined.document import Answer
    from optsched.model.schedule import Schedule
    from optsched.problems.quota.problem import QuotaPlan

LARGEST_POD: Final = 8
"""GPUs of a pod at most, by default."""

_KUEUE: Final = "kueue.x-k8s.io"
_POD_GROUPS: Final = {
    "podgroup": "scheduling.x-k8s.io/v1alpha1", "volcano": "scheduling.volcano.sh/v1beta1",
}  # fmt: skip
_SCHEDULERS: Final = {
    "podgroup": "scheduler-plugins-scheduler", "volcano": "volcano", "kueue": None,
    "optsched": "optsched",
}  # fmt: skip
_MANAGED: Final = {"app.kubernetes.io/managed-by": "optsched"}
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_HOST: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MOST_PODS: Final = 10**5  # of an Indexed Job with a completion mode


@dataclass(frozen=True)
class Gang:
    """A job to be started: its GPUs, all or none."""

    name: str
    """A label of RFC 1123: lower case, digits, ``-``."""
    gpus: int
    minimum: int | None = None
    """GPUs without which it cannot run; None: all."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """GPUs by node, if they are chosen."""
    priority: int | None = None
    """1 (first) to 99, of its group; None: that of the namespace."""

    def __post_init__(self) -> None:
        place = f"job {format_value(self.name)}"
        _check_name(place, self.name)
        integer(f"{place}: gpus", self.gpus, 0, 2**30)
        for node, count in self.nodes.items():
            integer(f"{place}: nodes[{format_value(node)}]", count, min(1, self.gpus), 2**30)
        if self.nodes and (total := sum(self.nodes.values())) != self.gpus:
            raise InputError(f"{place}: nodes: have {total} GPUs, but gpus says {self.gpus}")
        if self.minimum is not None:
            integer(f"{place}: minimum", self.minimum, 0, self.gpus)
        if self.priority is not None:
            integer(f"{place}: priority", self.priority, 1, 99)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Form of a manifest."""

    gang: Literal["podgroup", "volcano", "kueue", "optsched"] = "podgroup"
    """PodGroups of scheduler-plugins or Volcano, Jobs of Kueue, pods for the extender."""
    queue: str | None = None
    """Of Volcano (None: its default), or the LocalQueue of Kueue, which is required."""
    gpus_per_pod: int | None = None
    """At most; None: the largest number up to 8 that divides the GPUs on every node."""
    pin: bool = False
    """Whether pods run only on the chosen nodes: they are so small that they fill each exactly."""
    image: str = "job:latest"
    command: tuple[str, ...] | None = None
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        one_of("gang", self.gang, tuple(_SCHEDULERS))
        if self.queue is not None:
            if self.gang not in ("volcano", "kueue"):
                raise InputError(f"queue: is of volcano and kueue, but gang is {self.gang}")
            _check_name("queue", self.queue, 63, _HOST)
        elif self.gang == "kueue":
            raise InputError("queue: missing, Kueue admits jobs by their LocalQueue: give its name")
        if self.gpus_per_pod is not None:
            integer("gpus_per_pod", self.gpus_per_pod, 1, 2**20)
        for key in ("image", "gpu_resource"):
            if not label(key, getattr(self, key), 1000) or re.search(r"\s", getattr(self, key)):
                raise InputError(f"{key}: expected a name without spaces, got an empty one or some")


def manifest(gangs: Iterable[Gang], options: Options | None = None) -> dict[str, Any]:
    """Make a ``List``: priority classes, then a PodGroup and an Indexed Job per gang.

    ``parallelism = completions`` = pods = ceil(GPUs / GPUs per pod); the gang's minimum counts pods
    too. Larger priorities win in Kubernetes: 1 becomes 99, 99 becomes 1. Kueue may admit fewer pods
    than all, but not fewer than the minimum.
    """
    chosen = options or Options()
    rows = list(gangs)
    for name, count in Counter(gang.name for gang in rows).items():
        if count > 1:
            raise InputError(f"jobs: duplicate name {format_value(name)}")
    levels = sorted({gang.priority for gang in rows if gang.priority is not None})
    items: list[dict[str, Any]] = [_priority_class(level, chosen) for level in levels]
    for gang in rows:
        pods, gpus = pods_of(gang, chosen.gpus_per_pod, pin=chosen.pin)
        _check_name(f"job {format_value(gang.name)}", gang.name, 63 - len(f"-{pods - 1}"))
        needed = pods if gang.minimum is None else max(1, -(-gang.minimum // max(1, gpus)))
        if chosen.gang in _POD_GROUPS:
            items.append(_pod_group(gang, needed, chosen))
        items.append(_job(gang, pods, gpus, needed, chosen))
    return {"apiVersion": "v1", "kind": "List", "items": items}


def pods_of(gang: Gang, most: int | None = None, *, pin: bool = False) -> tuple[int, int]:
    """Count pods of a gang, and GPUs of each; equal pods may come to some GPUs too many.

    Pinned pods always divide the GPUs on every node, or the gang would never fit there.
    """
    if gang.gpus == 0:
        return 1, 0
    if most is None or pin:
        common = gcd(*gang.nodes.values()) if gang.nodes else gang.gpus
        limit = min(LARGEST_POD if most is None else most, common)
        most = next(n for n in range(limit, 0, -1) if common % n == 0)
    pods = -(-gang.gpus // most)
    if pods > _MOST_PODS:
        raise InputError(f"job {format_value(gang.name)}: {pods} pods, more than {_MOST_PODS}")
    return pods, -(-gang.gpus // pods)


def _check_name(place: str, name: Any, longest: int = 63, form: re.Pattern[str] = _LABEL) -> None:
    """A label of RFC 1123, or another form of names."""
    if not isinstance(name, str) or not form.fullmatch(name) or len(name) > longest:
        dots = " and ." * (form is _HOST)
        raise InputError(
            f"{place}: {format_value(name)} is not a Kubernetes name: expected at most {longest} "
            f"lower-case letters, digits, -{dots}, with a letter or digit at both ends"
        )


def _priority_class(level: int, options: Options) -> dict[str, Any]:
    kueue = options.gang == "kueue"
    return {
        "apiVersion": f"{_KUEUE}/v1beta1" if kueue else "scheduling.k8s.io/v1",
        "kind": "WorkloadPriorityClass" if kueue else "PriorityClass",
        "metadata": {"name": _class_of(level)},
        "value": 100 - level,
        "description": f"optsched priority {level} (1 goes first); in Kubernetes larger values win",
    }


def _class_of(level: int) -> str:
    return f"optsched-{100 - level}"


def _pod_group(gang: Gang, needed: int, options: Options) -> dict[str, Any]:
    spec: dict[str, Any] = {"minMember": needed}
    if options.queue is not None:
        spec["queue"] = options.queue
    if options.gang == "volcano" and gang.priority is not None:
        spec["priorityClassName"] = _class_of(gang.priority)
    kind = {"apiVersion": _POD_GROUPS[options.gang], "kind": "PodGroup"}
    return {**kind, "metadata": {"name": gang.name}, "spec": spec}


def _job(gang: Gang, pods: int, gpus: int, needed: int, options: Options) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": gang.name, "labels": dict(_MANAGED)}
    joined: dict[str, Any] = {"labels": dict(_MANAGED)}
    if options.gang == "podgroup":
        joined["labels"]["scheduling.x-k8s.io/pod-group"] = gang.name
    elif options.gang == "volcano":
        joined["annotations"] = {"scheduling.k8s.io/group-name": gang.name}
    elif options.gang == "optsched":
        joined["annotations"] = {"optsched/pods": str(pods)}
    else:
        meta["labels"][f"{_KUEUE}/queue-name"] = options.queue
        if gang.priority is not None:
            meta["labels"][f"{_KUEUE}/priority-class"] = _class_of(gang.priority)
        if needed < pods:
            least, equal = f"{_KUEUE}/job-min-parallelism", "job-completions-equal-parallelism"
            meta["annotations"] = {least: str(needed), f"{_KUEUE}/{equal}": "true"}
    container: dict[str, Any] = {"name": "main", "image": options.image}
    if options.command is not None:
        container["command"] = list(options.command)
    if gpus:
        container["resources"] = {"limits": {options.gpu_resource: gpus}}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if scheduler := _SCHEDULERS[options.gang]:
        pod["schedulerName"] = scheduler
    if gang.priority is not None and options.gang != "kueue":
        pod["priorityClassName"] = _class_of(gang.priority)
    if options.pin:
        pod["affinity"] = _affinity(gang)
    spec = {
        "completionMode": "Indexed", "parallelism": pods, "completions": pods, "backoffLimit": 0,
        "template": {"metadata": joined, "spec": pod},
    }  # fmt: skip
    if options.gang == "kueue":
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def _affinity(gang: Gang) -> dict[str, Any]:
    if not gang.nodes:
        raise InputError(
            f"job {format_value(gang.name)}: pin: no nodes are chosen; leave out --pin"
        )
    for node in gang.nodes:
        _check_name(f"job {format_value(gang.name)}: node", node, 253, _HOST)
    rule = {"key": "kubernetes.io/hostname", "operator": "In", "values": sorted(gang.nodes)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def of_plan(plan: QuotaPlan, schedule: Schedule) -> list[Gang]:
    """Jobs of a plan that run by its schedule, with the least number of GPUs each could run on."""
    quota, placement = plan.quota(schedule), plan.placement(schedule)
    found = []
    for job, span in zip(plan.jobs, plan.spans, strict=True):
        if gpus := quota[job.name]:
            least = min(sizes[0] for _, sizes in span)
            nodes = placement[job.name] if plan.nodes else {}
            found.append(Gang(job.name, gpus, min(least, gpus), nodes))
    return found


def of_answer(answer: Answer) -> list[Gang]:
    """Tasks that start by an answer of ``optsched cluster decide``; an agent is a node."""
    return [
        Gang(start.task, start.slots, None, dict(start.agents), start.priority)
        for start in answer.start or []
    ]
