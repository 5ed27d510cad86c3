"""What a file of others looks like: one about hosts and links, a log of jobs, a table of them."""

from __future__ import annotations


def looks_like(text: str) -> str:
    """``"; this looks like ..."``, if the kind of the text is recognised, else ``""``."""
    from optsched.bandwidth.topology import foreign  # files in order need neither
    from optsched.cluster.workload import trace

    return foreign.looks_like(text) or trace.looks_like(text)
