"""Times of the extender of kube-scheduler on 200 nodes: ``python -m benchmarks.service.extender``.

Medians in milliseconds of five calls, without HTTP, after a first call that loads kernels.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.plan import ClusterSnapshot
from optsched.service.extender import Extender
from optsched.service.known import Known

NODES = 200


def pod(gang: str, number: int, gpus: int, pods: int) -> dict[str, Any]:
    """Return a pod of a gang as kube-scheduler sends it, without fields that are not read."""
    meta = {"name": f"{gang}-{number}", "labels": {"job-name": gang},
            "annotations": {"optsched/pods": str(pods)}}  # fmt: skip
    resources = {"requests": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": meta, "spec": {"containers": [{"name": "main", "resources": resources}]}}


def main() -> None:
    """Print the first and a later pod of gangs."""
    hosts = [Host(f"n{i}", "h100", (f"s{i // 40}", f"r{i // 8}")) for i in range(NODES)]
    cluster = Cluster(
        tuple(hosts), (HostType("h100", 8, nic_rate=50.0),), ("spine", "rack"),
        factors={"cluster": 0.9}, uplinks={"rack": 200.0, "spine": 800.0},
    )  # fmt: skip
    state = ClusterState.idle(cluster)
    for i in range(0, 180, 3):
        state = state.take(f"n{i}:0-7 n{i + 1}:0-3", f"team-a/j{i}")
    known, names = Known(ClusterSnapshot(state)), [f"n{i}" for i in range(NODES)]
    print("GPUs a pod, pods: first pod, next pod, priorities (ms)")
    for gpus, pods in ((4, 1), (8, 1), (4, 4), (8, 8), (8, 16)):
        times = []
        for call in range(6):
            extender, begin = Extender(known), time.perf_counter()
            row = []
            for number in (0, 1):
                body = {"Pod": pod(f"g{call}", number, gpus, pods), "NodeNames": names}
                extender.filter(body)
                row.append(time.perf_counter() - begin)
                begin = time.perf_counter()
            extender.prioritize(body)
            times.append([*row, time.perf_counter() - begin])
        first, later, ranks = (1e3 * median(column) for column in zip(*times[1:], strict=True))
        print(f"{gpus}, {pods}: {first:.0f}, {later:.0f}, {ranks:.0f}")


if __name__ == "__main__":
    main()
