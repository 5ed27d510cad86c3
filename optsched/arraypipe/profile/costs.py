"""What jobs cost at any micro-batch size, and the fields of a `JobArray` that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.profile.document import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profile.document import Link, Profile, ProfiledJob
    from optsched.model.schedule import IntArray


_TIMES: Final = ("forward", "backward", "recompute", "update")
_SUMS: Final = (*(f"{key}_ns" for key in _TIMES), "saved", "input", "state", "gradients", "weights")
_LAGS: Final = {"lag_forward": "output", "lag_backward": "gradient"}


@dataclass(frozen=True, eq=False)
class Costs:
    """Times and bytes of one micro-batch of a job on every stage; arrays of shape (S,)."""

    forward_ns: IntArray
    backward_ns: IntArray
    recompute_ns: IntArray
    update_ns: IntArray
    saved: IntArray  # bytes from F to B
    input: IntArray  # bytes from F to B with recomputation
    workspace: IntArray  # of a recomputing block besides
    output: IntArray  # leaves the stage
    gradient: IntArray  # comes back for the output
    state: IntArray
    gradients: IntArray
    weights: IntArray

    def merged(self, cuts: Sequence[int], overhead_ns: int) -> Costs:
        """The costs of blocks when stages ``cuts[v] .. cuts[v + 1] - 1`` are one.

        F and B are blocks of their own, which cost `overhead_ns` beside their computation.
        """
        first, last = np.array(cuts[:-1]), np.array(cuts[1:]) - 1
        changes: dict[str, Any] = {key: np.add.reduceat(getattr(self, key), first) for key in _SUMS}
        changes["forward_ns"] += overhead_ns
        changes["backward_ns"] += overhead_ns
        changes["workspace"] = np.maximum.reduceat(self.workspace, first)
        return replace(self, output=self.output[last], gradient=self.gradient[last], **changes)

    def passes_ns(self, recompute: bool) -> IntArray:
        """Forward and backward time of a micro-batch on every stage."""
        both: IntArray = self.forward_ns + self.backward_ns
        return both + self.recompute_ns if recompute else both

    def one_device_ns(self, microbatches: int, recompute: bool) -> int:
        """Time of an iteration when one device has the whole model."""
        return microbatches * int(self.passes_ns(recompute).sum()) + int(self.update_ns.sum())

    def activations(self, recompute: bool) -> int:
        """Bytes of one micro-batch through the whole model on one device."""
        if recompute:
            return int(self.input.sum()) + int(self.workspace.max())
        return int(self.saved.sum())

    def one_device_bytes(self, recompute: bool) -> int:
        """Bytes of one job on one device."""
        return int((self.state + self.gradients).sum()) + self.activations(recompute)


def costs_of(profile: Profile, job: ProfiledJob, state: Sequence[int], size: int) -> Costs:
    """Times and bytes at a micro-batch size, as the profile has or predicts them."""
    stages = range(profile.n_stages)
    found: dict[str, Any] = {
        f"{key}_ns": [profile.duration_of(kind, s, size, job).median_ns for s in stages]
        for kind, key in KINDS.items()
    }
    for what in ("saved", "input", "output", "gradient"):
        found[what] = [profile.bytes_of(what, s, size, job.precision) for s in stages]
    found["state"] = state
    found["gradients"] = [stage.gradients_bytes for stage in profile.stages]
    found["weights"] = [stage.parameters_bytes for stage in profile.stages]
    arrays = {key: np.array(row, np.int64) for key, row in found.items()}
    return Costs(**arrays, workspace=np.maximum(arrays["saved"] - arrays["input"], 0))


def array_fields(
    costs: Sequence[Costs], link: Link, devices: Sequence[int] = (), unit_ns: int = 1
) -> dict[str, Any]:
    """Times, lags and bytes of a `JobArray`; times are rounded up to a unit.

    What crosses a cut takes its time over the link, unless both stages are on one of the
    `devices`; by default every stage has its own.
    """
    found: dict[str, Any] = {
        key: -(-np.array([getattr(one, f"{key}_ns") for one in costs]) // unit_ns) for key in _TIMES
    }
    where = devices or range(len(costs[0].forward_ns))
    for key, what in _LAGS.items():
        lags = [
            [
                ceil(link.time_ns(size) / unit_ns) if where[s] != where[s + 1] else 0
                for s, size in enumerate(getattr(one, what)[:-1].tolist())
            ]
            for one in costs
        ]
        found[key] = np.array(lags, np.int64).reshape(len(costs), -1)
    bytes_of = {
        "activation": "saved", "checkpoint": "input", "recompute_workspace": "workspace",
        "state": "state",
    }  # fmt: skip
    return found | {key: np.array([getattr(c, w) for c in costs]) for key, w in bytes_of.items()}
