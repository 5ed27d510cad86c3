"""
Keep the service in step with Kubernetes or Slurm
=================================================

Keep a live cluster of ``optsched serve`` as Kubernetes or Slurm has it::

    python sync_cluster.py kubernetes --every 5    # in a pod, from the API server
    python sync_cluster.py slurm --every 5         # from scontrol and squeue
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from msgspec.structs import replace

from optsched import plan
from optsched.bandwidth import Cluster
from optsched.errors import OptschedError
from optsched.plan.snapshot import from_tree
from optsched.service.client import Client, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

FACTS = {
    "kubernetes": ("gpus", "pod", "type", "group"),
    "slurm": ("gpus", "pod", "type", "group", "level", "priority", "time_left"),
}
"""Fields of jobs that a source knows; others, such as costs, are those of the service."""

SLICE = 1000
"""Most jobs of a part of one change."""


def kubernetes(cluster: Cluster) -> plan.ClusterSnapshot:
    """Read nodes and pods from the API server, as the service account of the pod."""
    url = os.environ.get("KUBERNETES_API", "https://kubernetes.default.svc")
    headers, verify = {}, None
    if url.startswith("https:"):
        import ssl

        headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
        verify = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    items: list[Any] = []
    with httpx.Client(base_url=url, headers=headers, verify=verify or True) as http:
        for kind in ("Node", "Pod"):
            found = http.get(f"/api/v1/{kind.lower()}s").raise_for_status().json()["items"]
            items += [{"kind": kind, **item} for item in found]
    return plan.from_kubernetes(cluster, {"items": items}, now=int(time.time()))


def slurm(cluster: Cluster) -> plan.ClusterSnapshot:
    """Read nodes and jobs from the controller."""
    commands = (["scontrol", "show", "node", "-d"], ["squeue", "--json"])
    nodes, jobs = (subprocess.run(one, capture_output=True, text=True, check=True).stdout
                   for one in commands)  # fmt: skip
    return plan.from_slurm(cluster, nodes, jobs, now=int(time.time()))


def changes(
    live: plan.ClusterSnapshot, real: plan.ClusterSnapshot, known: Iterable[str] = FACTS["slurm"]
) -> list[dict[str, Any]]:
    """Return the changes that make the live cluster the real one: what ends, then the others.

    Jobs and GPUs that are down are compared by their numbers on nodes, as Kubernetes shows them,
    waiting jobs by the fields that the source knows.
    """
    cluster = live.cluster

    def counts(gpus: Any) -> Counter[str]:
        return Counter({node: len(ids) for node, ids in cluster.by_machine(sorted(gpus)).items()})

    now = {job.name: counts(job.gpus) for job in live.state.jobs}
    then = {job.name: counts(job.gpus) for job in real.state.jobs}
    facts = {job.name: job for job in real.waiting}
    waiting = {job.name: job for job in live.waiting}
    gone = [name for name, held in now.items() if then.get(name) != held]
    gone += [name for name in waiting if name not in facts]
    state = live.state
    for name in gone:
        state = state.give(name) if name in now else state
    free, down = {*state.free}, {*state.down}

    def some(node: str, number: int, best: Any) -> list[int]:
        ids = free.intersection(cluster.machine(node))
        found = sorted(ids, key=lambda gpu: (gpu not in best, gpu))[:number]
        free.difference_update(found)
        return found

    less = counts(down) - counts(real.state.down)
    repair = [g for node, n in less.items() for g in sorted(down & {*cluster.machine(node)})[:n]]
    free.update(repair)
    more = counts(real.state.down) - counts(down)
    fail = [gpu for node, n in more.items() for gpu in some(node, n, real.state.down)]
    new, place = [], {}
    for job, held in real.running:
        if job.name not in now or job.name in gone:
            gpus = [gpu for node, n in then[job.name].items() for gpu in some(node, n, held.gpus)]
            place[job.name] = cluster.written(gpus)
            new.append(job)
    for name, job in facts.items():
        old = waiting.get(name)
        if old is None:
            new.append(job)
        elif old.array is None and any(getattr(old, key) != getattr(job, key) for key in known):
            of = {key: getattr(job, key) for key in known}
            new.append(replace(old, **of, submit=old.submit or 1))  # 0 would be the present
    found = [{"give": gone[i : i + SLICE]} for i in range(0, len(gone), SLICE)]
    found += [{"repair": cluster.written(repair), "fail": cluster.written(fail)}]
    for i in range(0, len(new), SLICE):
        jobs = new[i : i + SLICE]
        starts = {job.name: place[job.name] for job in jobs if job.name in place}
        found += [{"submit": jobs, "place": starts}]
    return [one for one in found if any(one.values())]


def update(client: Client, given: argparse.Namespace) -> None:
    """Compare and change once; create the cluster if there is none."""
    read = {"kubernetes": kubernetes, "slurm": slurm}[given.source]
    try:
        live = from_tree(client.read(given.cluster)["snapshot"], "live")
    except Refused as error:
        if error.status != 404 or given.create is None:
            raise
        client.create(given.cluster, read(Cluster.read(given.create)))
        return
    for parts in changes(live, read(live.cluster), FACTS[given.source]):
        client.change(given.cluster, **parts)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Keep a live cluster.")
    parser.add_argument("source", choices=["kubernetes", "slurm"])
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--cluster", default="main", help="name of the live cluster")
    parser.add_argument("--create", help="optsched.cluster/1, if the service has no such cluster")
    parser.add_argument("--every", type=float, help="seconds [default: once]")
    return parser.parse_args(words)


def main() -> None:
    """Compare and change, again and again."""
    given = arguments()
    with Client(given.url) as client:
        while True:
            try:
                update(client, given)
            except (OptschedError, httpx.HTTPError, subprocess.CalledProcessError) as error:
                if given.every is None:
                    raise
                print(f"sync_cluster: {error}", file=sys.stderr, flush=True)
            if given.every is None:
                return
            time.sleep(given.every)


if __name__ == "__main__":
    main()
