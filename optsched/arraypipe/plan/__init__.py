"""A schedule compiled for execution: checks, liveness, messages, segments of a run."""
