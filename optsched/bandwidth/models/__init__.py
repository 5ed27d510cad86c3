"""Bandwidths of sets of GPUs: measured, learnt, and under contention."""
