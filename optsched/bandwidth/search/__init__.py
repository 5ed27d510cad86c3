"""The best set of free GPUs: exact kernels, large clusters, the dispatcher."""
