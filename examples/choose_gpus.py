"""
Choose GPUs beside running jobs
===============================

Eight hosts in two racks, half of the GPUs in use. The choice has the highest bandwidth of all sets
of 12 free GPUs, by a model of link rates.
"""

from __future__ import annotations

from optsched.bandwidth import BottleneckBandwidth, Dispatcher, synthetic
from optsched.plots import gpu_map

# %%
# A cluster, and a state in which about half of the GPUs are free.
cluster = synthetic.cluster("nvswitch", 8, levels={"rack": 4})
state = synthetic.tenants(cluster, seed=2, share_free=0.5)
print(len(state.free), "free GPUs;", len(state.jobs), "jobs")

# %%
# Bandwidths by link rates, and the choice. Measurements make the model exact.
dispatcher = Dispatcher(cluster, BottleneckBandwidth(cluster))
gpus, bandwidth = dispatcher.choose(state, 12)
print(dispatcher.explain(state, 12))

# %%
# The frame marks the choice.
figure = gpu_map(state, chosen=gpus)
