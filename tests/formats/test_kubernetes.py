"""Manifests: counts are pods, names are valid, and what schedules say runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.errors import InputError
from optsched.formats.kubernetes import (
    Gang,
    Options,
    manifest,
    pods_of,
)
from optsched.service.extender import PODS


def job(made: Gang, **options: Any) -> dict[str, Any]:
    """The one Job of a manifest."""
    (found,) = (i for i in manifest([made], Options(**options))["items"] if i["kind"] == "Job")
    return dict(found)


@pytest.mark.parametrize(
    ("gpus", "nodes", "most", "expected"),
    [
        (16, {}, 8, (2, 8)), (12, {}, 8, (2, 6)),
        (0, {}, 8, (1, 0)), (32, {}, None, (4, 8)),
        (12, {"a": 8, "b": 4}, None, (3, 4)),
        (5, {"a": 4, "b": 1}, None, (5, 1)), (16, {"a": 16}, None, (2, 8)), (13, {}, None, (13, 1)),
        (8, {"a": 5, "b": 3}, 4, (2, 4)), (8, {"a": 8}, 3, (3, 3)),
    ],
)  # fmt: skip
def test_pods(gpus: int, nodes: Any, most: int | None, expected: tuple[int, int]) -> None:
    """ceil(GPUs / GPUs per pod), as evenly as may be."""
    assert pods_of(Gang("j", gpus, nodes=nodes), most) == expected
    pinned = {4: (8, 1), 3: (4, 2)}.get(most or 0, expected) if gpus == 8 else None
    assert pinned is None or pods_of(Gang("j", gpus, nodes=nodes), most, pin=True) == pinned


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 500))
def test_counts(gpus: int, most: int, minimum: int) -> None:
    """Parallelism is completions is pods; the minimum counts pods as well."""
    minimum = min(minimum, gpus)
    gang = Gang("j", gpus, minimum)
    spec = job(gang, gpus_per_pod=most)["spec"]
    assert spec["parallelism"] == spec["completions"] == -(-gpus // most)
    assert spec["completionMode"] == "Indexed"
    (limit,) = spec["template"]["spec"]["containers"][0]["resources"]["limits"].values()
    assert limit <= most and spec["parallelism"] * limit >= gpus
    (group,) = (i for i in manifest([gang], Options(gpus_per_pod=most))["items"]
                if i["kind"] == "PodGroup")  # fmt: skip
    needed = group["spec"]["minMember"]
    assert needed * limit >= minimum > (needed - 1) * limit and needed <= spec["parallelism"]


META = {"name": r"[a-z0-9-]{1,63}", "labels?": {".*": r"[\w.-]{1,63}"},
        "annotations?": {".*": ".*"}}  # fmt: skip
TERM = {"matchExpressions": [{"key": ".+", "operator": "In|NotIn|Exists", "values?": [".+"]}]}
AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution?": {"nodeSelectorTerms": [TERM]}}
POD = {
    "restartPolicy": "Never|OnFailure", "priorityClassName?": ".+", "schedulerName?": ".+",
    "containers": [{"name": ".+", "image": ".+", "command?": [".*"],
                    "resources?": {"limits?": {".*": int}}}],
    "affinity?": {"nodeAffinity?": AFFINITY},
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    # kubernetes/kubernetes: api/openapi-spec/v3/apis__batch__v1_openapi.json
    "batch/v1 Job": {"metadata": META, "spec": {
        "completionMode?": "Indexed|NonIndexed", "parallelism?": int, "completions?": int,
        "backoffLimit?": int, "suspend?": bool,
        "template": {"metadata?": {k: v for k, v in META.items() if "?" in k}, "spec": POD}}},
    # kubernetes/kubernetes: api/openapi-spec/v3/apis__scheduling.k8s.io__v1_openapi.json
    "scheduling.k8s.io/v1 PriorityClass": {
        "metadata": META, "value": int, "description?": ".*", "preemptionPolicy?": "Never|.*"},
    # kubernetes-sigs/scheduler-plugins: config/crd/bases/scheduling.x-k8s.io_podgroups.yaml
    "scheduling.x-k8s.io/v1alpha1 PodGroup": {"metadata": META, "spec?": {
        "minMember?": int, "minResources?": {".*": ".*"}, "scheduleTimeoutSeconds?": int}},
    # volcano-sh/volcano: config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml
    "scheduling.volcano.sh/v1beta1 PodGroup": {"metadata": META, "spec?": {
        "minMember?": int, "queue?": ".+", "priorityClassName?": ".+",
        "minResources?": {".*": ".*"}, "minTaskMember?": {".*": int}}},
    # kubernetes-sigs/kueue: config/components/crd/bases/kueue.x-k8s.io_workloadpriorityclasses.yaml
    "kueue.x-k8s.io/v1beta1 WorkloadPriorityClass": {
        "metadata": META, "value": int, "description?": ".*"},
}  # fmt: skip
"""Fields of what is written: ``?`` may be left out, a text is a pattern, an integer is an int32."""


def wrong(value: Any, rule: Any, at: str = "") -> list[str]:
    """Where a value breaks a schema."""
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            return [at]
        if set(rule) == {".*"}:
            return [x for key, v in value.items() for x in wrong(v, rule[".*"], f"{at}.{key}")]
        known = {key.rstrip("?"): inner for key, inner in rule.items()}
        found = [f"{at}.{key}" for key in value if key not in known]
        found += [f"{at}.{key}" for key in rule if key[-1] != "?" and key not in value]
        return found + [x for key, v in value.items() if key in known
                        for x in wrong(v, known[key], f"{at}.{key}")]  # fmt: skip
    if isinstance(rule, list):
        rows = value if isinstance(value, list) and value else [None]
        return [x for i, row in enumerate(rows) for x in wrong(row, rule[0], f"{at}[{i}]")]
    if isinstance(rule, str):
        return [at] * (not isinstance(value, str) or re.fullmatch(rule, value) is None)
    least = 1 if at.endswith("minMember") else 0
    return [at] * (type(value) is not rule or (rule is int and not least <= value < 2**31))


JOINED = {
    "podgroup": ("labels", "scheduling.x-k8s.io/pod-group", "scheduler-plugins-scheduler"),
    "volcano": ("annotations", "scheduling.k8s.io/group-name", "volcano"),
    "optsched": ("annotations", PODS[0], "optsched"),
}


@given(
    st.sampled_from([*JOINED, "kueue"]), st.integers(0, 40), st.integers(0, 40),
    st.none() | st.integers(1, 99), st.booleans(),
)  # fmt: skip
def test_schemas(gang: Any, gpus: int, minimum: int, priority: int | None, pin: bool) -> None:
    """Every object is what its published schema takes; pods join their group."""
    queue = "team.a" if gang == "kueue" or (gang == "volcano" and pin) else None
    made = Gang("j", gpus, min(minimum, gpus), {"n1": gpus}, priority)
    options = Options(gang=gang, queue=queue, pin=pin, command=("run",))
    tree = manifest([made], options)
    assert (tree["apiVersion"], tree["kind"]) == ("v1", "List")
    kinds = {}
    for item in tree["items"]:
        name = f"{item['apiVersion']} {item['kind']}"
        rest = {key: v for key, v in item.items() if key not in ("apiVersion", "kind")}
        assert not wrong(rest, SCHEMAS[name]), name
        assert wrong(rest | {"more": 1}, SCHEMAS[name]) == [".more"]
        kinds[name] = rest
    spec = kinds["batch/v1 Job"]["spec"]
    pod, meta, own = spec["template"]["spec"], spec["template"]["metadata"], kinds["batch/v1 Job"]
    level = None if priority is None else f"optsched-{100 - priority}"
    groups = [v for name, v in kinds.items() if name.endswith(" PodGroup")]
    assert len(groups) == (gang in ("podgroup", "volcano"))
    if gang != "kueue":
        where, key, scheduler = JOINED[gang]
        joins = str(spec["completions"]) if gang == "optsched" else "j"
        assert meta[where][key] == joins and pod["schedulerName"] == scheduler
        assert pod.get("priorityClassName") == level and "suspend" not in spec
        plain = {key: v for key, v in own["metadata"].items() if key != "labels"}
        assert all(group["metadata"] == plain for group in groups)
        if gang == "volcano":
            assert groups[0]["spec"].get("queue") == queue
            assert groups[0]["spec"].get("priorityClassName") == level
        return
    # pkg/controller/jobs/job/job_webhook.go of Kueue
    assert spec["suspend"] is True and not {"schedulerName", "priorityClassName"} & set(pod)
    labels, notes = own["metadata"]["labels"], own["metadata"].get("annotations", {})
    assert labels["kueue.x-k8s.io/queue-name"] == "team.a"
    assert labels.get("kueue.x-k8s.io/priority-class") == level
    if notes:
        least = int(notes["kueue.x-k8s.io/job-min-parallelism"])
        assert 0 < least < spec["parallelism"] == spec["completions"]
        assert notes["kueue.x-k8s.io/job-completions-equal-parallelism"] == "true"


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_priorities_are_inverted(levels: list[int]) -> None:
    """The smaller the priority here, the larger there; equal ones share a class."""
    gangs = [Gang(f"j{i}", 1, priority=level) for i, level in enumerate(levels)]
    items = manifest(gangs)["items"]
    value = {i["metadata"]["name"]: i["value"] for i in items if i["kind"] == "PriorityClass"}
    assert len(value) == len(set(levels))
    jobs = [i["spec"]["template"]["spec"] for i in items if i["kind"] == "Job"]
    found = [value[pod["priorityClassName"]] for pod in jobs]
    assert sorted(range(len(levels)), key=lambda i: (levels[i], i)) == sorted(
        range(len(levels)), key=lambda i: (-found[i], i)
    )


@given(st.text(max_size=70) | st.from_regex(re.compile(r"[a-z0-9-]{1,66}"), fullmatch=True))
def test_names(name: str) -> None:
    """Labels of RFC 1123 that leave room for the pods' index, or a sentence."""
    good = re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,59}[a-z0-9])?", name) is not None
    if good:
        assert job(Gang(name, 8))["metadata"]["name"] == name
    else:
        with pytest.raises(InputError, match="is not a Kubernetes name"):
            job(Gang(name, 8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: manifest([Gang("a", 1), Gang("a", 2)]), 'duplicate name "a"'),
        (lambda: manifest([Gang("a", 1, priority=100)]), "priority"),
        (lambda: manifest([Gang("a", 1)], Options(pin=True)), "leave out --pin"),
        (lambda: manifest([Gang("a", 1, nodes={"N_1": 1})], Options(pin=True)), "node"),
        (lambda: manifest([Gang("a", 4, nodes={"n": 3})]), 'job "a": nodes: have 3 GPUs, but gpus'),
        (lambda: manifest([Gang("a", 4, nodes={"n": -4})]), 'nodes["n"]: expected an integer in 1'),
        # type: ignore[arg-type]
        (lambda: Options(gang="kueue"), "queue: missing"),
        (lambda: Options(queue="a"), "queue: is of volcano and kueue, but gang is podgroup"),
        (lambda: Options(image="a b"), "image"),
        # type: ignore[arg-type]
    ],
)
def test_refused(make: Any, said: str) -> None:
    """One sentence each."""
    with pytest.raises(InputError) as error:
        make()
    assert said in str(error.value) and "\n" not in str(error.value)
