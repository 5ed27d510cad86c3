"""What Determined's schedulers answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Decision:
    """Who starts where, and who is to give its slots back.

    Slots come free only when a released task has stopped: nothing in `start` waits for that.
    """

    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task -> {agent: slots}, in the order of the decision.

    By fair share, each task fits alone: the caller looks again before it really starts one (as
    `apply` does). By priority they fit together, slot tasks and zero-slot tasks.
    """
    release: tuple[str, ...] = ()
    """Running tasks to be preempted, in the order of the decision."""
    backfilled: tuple[str, ...] = ()
    """Those of `start` that pass a task of a better priority that does not fit."""

    def __bool__(self) -> bool:
        return bool(self.start or self.release)
