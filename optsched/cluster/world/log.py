"""The raw record of a simulation: one row per uninterrupted stay of a job at one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.cluster.world.layout import HALF_A, HALF_B, WHOLE

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

__all__ = ["HALF_A", "HALF_B", "WHOLE", "Log"]


class Log(NamedTuple):
    """Stays by start, ties by job; times in the workload's unit.

    In ``[start, start + restart)`` the job holds its GPUs without progress.
    """

    job: IntArray
    start: IntArray
    end: IntArray
    restart: IntArray
    gpus: IntArray
    """0 for a zero-slot task."""
    half: IntArray
    """`WHOLE`: its GPUs are its own; `HALF_A`, `HALF_B`: the half of each that it shares."""
    work: IntArray
    """Work done in the stay that counts (after losses by ``checkpoint="pass"``)."""
    node_ptr: IntArray
    node: IntArray
    count: IntArray  # type: ignore[assignment]  # tuple.count
    """The stay's GPUs by node: rows ``node_ptr[i]:node_ptr[i + 1]``, nodes ascending."""
    finished: IntArray
    """End of every job of the workload; -1 if it did not end. Shape (jobs,)."""
    preemptions: IntArray
    """Times a running job was taken off all its GPUs before its end. Shape (jobs,)."""
    partner: IntArray | None = None
    """For a stay put on the GPUs of a running one: the row of that stay; -1 for all others.

    None without packing. Both of a pair are halves, different ones, for their whole stays.
    """
