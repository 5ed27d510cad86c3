"""Bandwidths of sets of GPUs: measured, learnt, of pods, and under contention."""
