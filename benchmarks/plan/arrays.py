"""Times of plans of job arrays: from the snapshot to the verified schedule of the cluster.

Run: python benchmarks/plan/arrays.py [--seeds 5] [--hosts 8] [--arrays 20] [--time 0.5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from optsched import JobArray, bandwidth, plan, verify
from optsched.plan.snapshot import from_tree

MODELS = (("bert_large", 8), ("gpt2_xl", 8), ("vgg19", 4), ("resnet152", 6))


def case(hosts: int, arrays: int, seed: int) -> plan.ClusterSnapshot:
    """Free hosts of 8 GPUs, and arrays of 3 to 8 jobs of four models, all different."""
    rng, requests = random.Random(seed), []
    for k in range(arrays):
        model, stages = rng.choice(MODELS)
        batches = [rng.choice((4, 8, 12, 16, 24, 32)) for _ in range(rng.randint(3, 8))]
        array = JobArray.from_profile(model, stages=stages, batch_sizes=batches)
        requests.append(plan.PlanJob(
            name=f"a{k}", gpus=stages, level=rng.choice((None, "host")),
            array=plan.ArrayRequest(problem=array, steps=1000, weight=rng.choice((1.0, 2.0))),
        ))  # fmt: skip
    state = bandwidth.ClusterState.idle(bandwidth.synthetic.cluster("nvswitch", hosts))
    return plan.ClusterSnapshot(state, requests)


def main() -> None:
    """Print times, starts, and the gap to a bound on busy GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--arrays", type=int, default=20)
    parser.add_argument("--time", type=float, default=0.5, help="seconds for all orders")
    given = parser.parse_args()
    times, cpu, starts, gaps, above = [], [], [], [], []
    for seed in range(-1, given.seeds):  # the first loads kernels
        tree = json.loads(case(given.hosts, given.arrays, max(0, seed)).to_json())
        begin, before = time.perf_counter(), time.process_time()
        found = plan.plan(from_tree(tree, "snapshot"))
        document = plan.order_arrays(found, time_limit=given.time)
        assert not verify(document)
        times.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - before)
        arrays = plan.planned_arrays(document)
        starts.append(len(arrays))
        gaps.append(1 - sum(one.busy for one in arrays) / found.busy_bound)
        above += [one.period / one.bound - 1 for one in arrays]
    print("GPUs  arrays  starts  median s  worst s  CPU s  worst gap  orders above their bound")
    print(
        f"{8 * given.hosts:4} {given.arrays:7} {statistics.mean(starts[1:]):7.1f} "
        f"{statistics.median(times[1:]):9.2f} {max(times[1:]):8.2f} "
        f"{statistics.median(cpu[1:]):6.2f} {max(gaps[1:]):10.1%} {statistics.mean(above):10.1%}"
    )


if __name__ == "__main__":
    main()
