"""Solvers of rolling job arrays: least period."""
