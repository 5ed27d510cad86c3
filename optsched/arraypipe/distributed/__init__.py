"""One device a process: channels on torch.distributed, the ranks as one."""
