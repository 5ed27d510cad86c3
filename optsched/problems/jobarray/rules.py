"""Rules of a `JobArray` that join several fields; refusals name field, index and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.problems.jobarray.checks import refuse

if TYPE_CHECKING:
    from optsched.problems.jobarray.problem import JobArray

_TIMES: Final = (
    "forward", "backward", "weight", "recompute", "update", "switch", "lag_forward", "lag_backward",
)  # fmt: skip


def check(array: JobArray) -> None:
    """Rules that join several fields."""
    kept = np.minimum(array.activation, array.checkpoint)
    if array.recompute_mode == "never":
        kept = array.activation
    elif array.recompute_mode == "always":
        kept = array.checkpoint
    elif not isinstance(array.recompute_mode, str):
        kept = np.where(np.array(array.recompute_mode)[:, None], array.checkpoint, array.activation)
    if array.weight is None and array.weight_memory.any():
        raise InputError("weight_memory: needs weight blocks (weight=...)")
    refuse(
        array.weight_memory > kept, "weight_memory", array.weight_memory, "at most the kept bytes"
    )
    refuse(array.lag_forward < -array.forward[:, :-1], "lag_forward", array.lag_forward,
            "not below minus the forward time of its stage")  # fmt: skip
    refuse(array.lag_backward < -array.backward[:, 1:], "lag_backward", array.lag_backward,
            "not below minus the backward time of the stage it leaves")  # fmt: skip
    if array.update_mode == "fused" and array.microbatch_order == "free" and array.update.any():
        raise InputError(
            'update_mode: "fused" needs microbatch_order="fixed" (else the last micro-batch is '
            'unknown); use "block"'
        )
    if array.objective == "period" and array.release.any():
        raise InputError('release: not allowed with objective="period"')
    times = [getattr(array, key) for key in _TIMES if getattr(array, key) is not None]
    # Python integers: the sums themselves may overflow; a switch counts at every block
    once = sum(int(t[t > 0].astype(object).sum()) for t in times)
    once += 5 * int(array.switch.astype(object).sum())
    repeats = zip(array.micro_batches.tolist(), array.multiplicity.tolist(), strict=True)
    total = once * max(m * r for m, r in repeats) + int(array.release.max())
    if total > MAX_INTEGER:
        raise InputError(f"forward, backward, ...: times add up to {total}, more than 2^53")
    for key in ("activation", "checkpoint", "recompute_workspace", "weight_memory"):
        table, count = getattr(array, key), array.micro_batches.astype(object)
        if (total := int((table.astype(object).sum(axis=1) * count).sum())) > MAX_INTEGER // 4:
            raise InputError(f"{key}: adds up to {total} bytes, more than 2^51")
    _check_switches(array)


def _check_switches(array: JobArray) -> None:
    """One switch time per (job, device): then setups are triangular."""
    shared = isinstance(array.place[0], int)  # one place for all jobs and micro-batches
    if not array.switch.any() or (shared and len(set(array.place)) == array.n_stages):
        return
    for j in range(array.n_jobs):
        known: dict[int, int] = {}  # device -> a stage on it
        for m in range(1 if shared else int(array.micro_batches[j])):
            for v, d in enumerate(array.devices_of(j, m).tolist()):
                first = known.setdefault(d, v)
                if array.switch[j, v] != array.switch[j, first]:
                    raise InputError(
                        f"jobs[{j}].switch[{v}]: {array.switch[j, v]}, but stage {first} on the "
                        f"same device has {array.switch[j, first]}"
                    )
