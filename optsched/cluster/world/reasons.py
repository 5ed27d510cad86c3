"""Why a job or a task waits: a word for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Why(StrEnum):
    """Kinds of reasons."""

    NEVER = "never"  # it does not fit the cluster even if nothing else runs
    SHARE = "share"  # what its group may have is used up, or smaller than it
    ROOM = "room"  # too little is free
    GANG = "gang"  # enough is free in all, but not on the nodes that one gang needs
    RELEASE = "release"  # room is made for it: it starts when what is released has stopped
    ORDER = "order"  # it fits, but others go first


class Reason(NamedTuple):
    """Why something waits."""

    why: Why
    text: str


def of_free_gpus(least: int, free: int, total: int, policy: str) -> Reason:
    """Why a job whose smallest size is `least` waits, by the free GPUs and all that take work."""
    if least == 0:
        return Reason(Why.ROOM, "needs a zero-slot unit of a node")
    needs = f"needs {least} GPU{'s' * (least != 1)}"
    if least > total:
        return Reason(Why.NEVER, f"{needs}, the nodes that take work have {total}")
    if least > free:
        return Reason(Why.ROOM, f"{needs}, {free} are free")
    return Reason(Why.ORDER, f"{needs}, {free} are free, but policy {policy:.60} keeps it back")
