"""Merge neighbouring stages of a job array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.jobarray.problem import JobArray

_SUMS: Final = (
    "forward", "backward", "recompute", "update", "switch", "activation", "weight_memory", "state",
)  # fmt: skip


def merged(array: JobArray, cuts: Sequence[int], **changes: Any) -> JobArray:
    """Make the array in which stages ``cuts[v] .. cuts[v + 1] - 1`` are stage v.

    Times and bytes add up; with recomputation a stage keeps the input of its first part. Memory,
    place and names of devices are dropped unless they are among the `changes`.
    """
    first, ends = np.array(cuts[:-1]), np.array(cuts[1:-1], np.int64) - 1
    fields: dict[str, Any] = {
        key: np.add.reduceat(getattr(array, key), first, axis=1) for key in _SUMS
    }
    if array.weight is not None:
        fields["weight"] = np.add.reduceat(array.weight, first, axis=1)
    fields["checkpoint"] = array.checkpoint[:, first]
    again = np.maximum(fields["activation"] - fields["checkpoint"], 0)
    fields["recompute_workspace"] = again if array.recompute_workspace.any() else 0 * again
    fields |= {key: getattr(array, key)[:, ends] for key in ("lag_forward", "lag_backward")}
    fields |= {"memory": 0, "place": None, "devices": None, "servers": None}
    made: JobArray = array.replace(**fields | changes)
    return made
