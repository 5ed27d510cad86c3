"""
Compare scheduling policies on one workload
===========================================

300 jobs on 4 nodes with 8 GPUs under four policies. Replace the workload by your own trace with
``optsched.cluster.read_trace``.
"""

from __future__ import annotations

from optsched.cluster import Nodes, simulate, synthetic
from optsched.plots import simulation_report

# %%
# Poisson arrivals, lognormal durations, gangs as in the Philly trace; times in seconds.
workload = synthetic(300, seed=1)
nodes = Nodes(4, gpus=8)
runs = {name: simulate(workload, name, nodes) for name in ("fifo", "srtf", "las", "fair_share")}

# %%
# Mean completion times.
for name, run in runs.items():
    print(
        f"{name:10} mean JCT {run.metrics.jct_mean:8.0f} s, {run.metrics.preemptions} preemptions"
    )

# %%
# Distribution of completion times, their parts, GPUs in use.
figure = simulation_report(runs)
