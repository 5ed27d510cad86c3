"""Broken rules of a schedule, and the names in their messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule

Kind: TypeAlias = Literal[
    "sequence", "order", "overlap", "setup", "precedence", "release", "deadline",
    "memory", "free", "balance", "liveness", "objective", "instance",
]  # fmt: skip

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""Every kind of violation; ``docs/orders/verifier.md`` explains them one by one."""


@dataclass(frozen=True)
class Violation:
    """A rule that a schedule breaks.

    Parameters
    ----------
    kind
        Which rule, one of `KINDS`.
    operations
        The operations involved, first the one that should come first; for ``"liveness"`` the
        operations on the cycle, for ``"objective"`` and ``"instance"`` none.
    resource
        The resource, or None if the rule concerns no single one.
    amount
        Size of the violation: time units; bytes for ``"memory"``, ``"free"`` and ``"balance"``;
        entries too few or too many for ``"sequence"``; 0 for ``"liveness"`` and ``"instance"``.
    message
        One sentence with the operations, the amount and the unit.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)]])
    >>> late = optsched.Schedule.from_starts(shop, [[0, 2]])
    >>> [violation.kind for violation in optsched.verify(late)]
    ['precedence']
    """

    kind: Kind
    operations: tuple[int, ...]
    resource: int | None
    amount: int
    message: str

    def __str__(self) -> str:
        return self.message


class Names:
    """Names of operations, resources and times of one schedule for messages."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._microbatches = bool(schedule.microbatch.any())
        self._iterations = bool(schedule.iteration.any())

    def operation(self, i: int) -> str:
        """``operation 12 (job 3, F, stage 2)``."""
        s = self._schedule
        labels = [f"job {_printable(s.job_name(int(s.job[i])))}"]
        if s.kind[i]:
            labels.append(_printable(str(s.kind[i])))
        labels.append(f"stage {s.stage[i]}")
        if self._microbatches:
            labels.append(f"micro-batch {s.microbatch[i]}")
        if self._iterations:
            labels.append(f"iteration {s.iteration[i]}")
        return f"operation {i} ({', '.join(labels)})"

    def resource(self, r: int) -> str:
        """The name of a resource."""
        return _printable(self._schedule.resources[r].name) or f"resource {r}"

    def time(self, amount: int) -> str:
        """``5 us``."""
        return f"{amount} {self._schedule.time_unit}".rstrip()


def count(number: int, noun: str) -> str:
    """``1 byte``, ``2 bytes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _printable(text: str) -> str:
    # names come from files: no control characters on a terminal
    return text if text.isprintable() else ascii(text)
