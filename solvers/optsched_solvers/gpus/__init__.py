"""Solvers that choose GPUs."""
