"""Solving: limits, monitor, result, and the registry of solvers."""
