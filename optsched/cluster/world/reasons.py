"""Why a job or a task waits: a word for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Why(StrEnum):
    """Kinds of reasons."""

    NEVER = "never"
    """It does not fit the cluster even if nothing else runs."""
    SHARE = "share"
    """What its group may have is used up, or smaller than it."""
    ROOM = "room"
    """Too little is free."""
    GANG = "gang"
    """Enough is free in all, but not on the nodes that one gang needs."""
    RELEASE = "release"
    """Room is made for it: it starts when what is released has stopped."""
    ORDER = "order"
    """It fits, but others go first."""


class Reason(NamedTuple):
    """Why something waits."""

    why: Why
    text: str
