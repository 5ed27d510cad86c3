"""Solvers against each other: many solves, each in its own process, and a table of the gaps."""
