"""Determined's two schedulers as pure functions: a state in, who starts and who is released out.

`fair_share` and `priority` decide for one pool, `decide` for several, each by its own settings;
`apply` makes a decision true, `queue` says who waits behind whom. Nothing given is ever modified.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.cluster.determined.decisions import (
        Decision,
        fair_share,
        fair_share_offers,
        find_fit,
        priority,
    )
    from optsched.cluster.determined.pools import Pool, apply, decide
    from optsched.cluster.determined.state import Agent, Group, State, Task
    from optsched.cluster.determined.waiting import Queued, order, queue

# no module may have the name of something public: importing it would take its place
_HOME: Final = {
    "Agent": "state", "Decision": "decisions", "Group": "state", "Pool": "pools",
    "Queued": "waiting", "State": "state", "Task": "state", "apply": "pools", "decide": "pools",
    "fair_share": "decisions", "fair_share_offers": "decisions", "find_fit": "decisions",
    "order": "waiting", "priority": "decisions", "queue": "waiting",
}  # fmt: skip

__all__ = [
    "Agent", "Decision", "Group", "Pool", "Queued", "State", "Task", "apply", "decide",
    "fair_share", "fair_share_offers", "find_fit", "order", "priority", "queue",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.cluster.determined' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.cluster.determined.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
