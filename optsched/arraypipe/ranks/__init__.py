"""Parts of the process backend: channels on torch.distributed, swaps, gathering, clocks."""
