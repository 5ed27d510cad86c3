"""Interchangeable backends of optsched, found by the entry-point group ``optsched.solvers``."""
