"""Which GPUs a job gets."""
