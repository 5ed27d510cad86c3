"""GPU quotas on bare arrays: exact allocation in NumPy, with certificates of optimality.

Public, and the only part of the solvers that `optsched.cluster` and `optsched.elastic` import.
"""

from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.multiple_choice import choice
from optsched_solvers.quota.shares import admit, max_min, proportional
from optsched_solvers.quota.tables import makespan, max_min_table

__all__ = [
    "Certificate", "admit", "choice", "makespan", "max_min", "max_min_table",
    "proportional",
]  # fmt: skip
