"""How a simulation treats time, restarts and resizing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from optsched.cluster.workload.nodes import NodeChange
from optsched.cluster.world.start import Start
from optsched.errors import InputError
from optsched.io.values import format_value, integer, one_of

RESIZES: Final = ("pass", "anytime")
CHECKPOINTS: Final = ("immediate", "pass")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold the settings of `simulate` other than jobs, nodes and policy.

    Parameters
    ----------
    restart_cost
        Time without progress at a start after a preemption or a resize; a job's own goes first.
    resize
        ``"pass"``: the size of a running job changes only at the end of one of its passes (a
        preemption is possible at any time); ``"anytime"``.
    checkpoint
        A stop (a preemption, or a resize within a pass) loses nothing (``"immediate"``), or what
        was done since the last end of a pass or stop (``"pass"``).
    round
        The policy also decides at all multiples of so many units of time; 0: events only.
    changes
        Nodes that are added, drained or removed.
    seed
        Of the noise of uncertainty curves, for jobs that are given one by one.
    start
        A running cluster to begin with; None: an empty one.

    Raises
    ------
    InputError
        A negative number, or an unknown name.

    Examples
    --------
    >>> optsched.cluster.Settings(restart_cost=30, resize="anytime").checkpoint
    'immediate'
    """

    restart_cost: int = 0
    resize: Literal["pass", "anytime"] = "pass"
    checkpoint: Literal["immediate", "pass"] = "immediate"
    round: int = 0
    changes: tuple[NodeChange, ...] = ()
    seed: int = 0
    start: Start | None = None

    def __post_init__(self) -> None:
        for key in ("restart_cost", "round", "seed"):
            object.__setattr__(self, key, integer(key, getattr(self, key)))
        one_of("resize", self.resize, RESIZES)
        one_of("checkpoint", self.checkpoint, CHECKPOINTS)
        if self.start is not None and not isinstance(self.start, Start):
            raise InputError(f"start: expected Start(now, stays), got {format_value(self.start)}")
        given: Any = self.changes
        changes = tuple(given) if isinstance(given, Iterable) else (given,)
        for change in changes:
            if not isinstance(change, NodeChange) or given is change:
                raise InputError(
                    f"changes: expected a list of NodeChange, got {format_value(self.changes)}"
                )
        object.__setattr__(self, "changes", changes)
