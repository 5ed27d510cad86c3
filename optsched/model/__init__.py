"""Graphs and schedules: the type, its documents, evaluation, bounds and the verifier."""
