"""What weight gradients can fill while a job's next iteration travels to a stage, given its memory.

Between a stage's last input gradient of one iteration and its first forward block of the next the
gradient goes back to stage 0 and the next iteration comes from there. The stage's own work then is
what it has put off, weight gradients, and memory limits how many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.bounds import paths_from

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import Schedule


def window_bound(once: Schedule, mine: npt.NDArray[np.int64]) -> int:
    """The longest that one iteration of a job keeps any stage: its work there and what is idle.

    From the first forward block of an iteration to that of the next lies all work of the stage,
    and the window. Within the window only weight gradients and updates run: those of the last k
    micro-batches, where k - 1 of them fit the memory beside what the last gradient block needs.

    Parameters
    ----------
    once
        Graph of one iteration; each job's micro-batches in fixed order.
    mine
        The operations of the job.
    """
    stages = [_Stage(once, mine[once.stage[mine] == v]) for v in np.unique(once.stage[mine])]
    ways = [paths_from(once, stage.first) for stage in stages]
    longest = 0
    for v, stage in enumerate(stages):
        behind = paths_from(once, stage.gradient)
        returns = [
            behind[stages[u].last] + int(once.duration[stages[u].last]) + ways[u][stage.first]
            for u in range(v + 1)
            if stages[u].last in behind and stage.first in ways[u]
        ]
        window = max(returns, default=0) - int(once.duration[stage.gradient])
        if stage.alone:
            longest = max(longest, stage.work + max(0, window - stage.put_off))
    return longest


class _Stage:
    """One job's blocks on one stage; ids ascend with the micro-batches."""

    def __init__(self, once: Schedule, blocks: npt.NDArray[np.int64]) -> None:
        def of_kind(*kinds: str) -> list[int]:
            found: list[int] = blocks[np.isin(once.kind[blocks], kinds)].tolist()
            return found

        forward, weights, updates = of_kind("F"), of_kind("W"), of_kind("U")
        self.first = forward[0]
        self.gradient = of_kind("B", "I")[-1]
        self.last = (updates or weights or [self.gradient])[-1]
        self.alone = len(np.unique(once.single_resource[blocks])) == 1  # not Chimera's
        self.work = int(once.duration[blocks].sum())
        late = len(weights)
        memory = int(once.memory[once.single_resource[self.gradient]])
        kept = int(once.free[weights[-1]]) if weights else 0
        if memory and kept:
            beside = int(once.acquire[forward[-1]] + once.workspace[self.gradient])
            late = min(late, 1 + max(0, memory - beside) // kept)
        put_off = [*weights[len(weights) - late :], *updates]
        self.put_off = int(once.duration[put_off].sum())
