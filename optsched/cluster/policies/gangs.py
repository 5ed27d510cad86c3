"""At which size a rigid policy runs an elastic job."""

from __future__ import annotations

from optsched.cluster.workload.speedup import MOST_GPUS
from optsched.io.values import integer


def checked_gang(gang: int | None) -> int | None:
    """The option ``gang`` of rigid policies."""
    return None if gang is None else integer("gang", gang, 1, MOST_GPUS)
