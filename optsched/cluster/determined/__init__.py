"""Schedulers of Determined and Kubernetes as pure functions: a state in, a decision out.

`fair_share`, `priority` and `kubernetes` decide for one pool, `decide` for several; `apply` returns
the state after a decision. Nothing given is ever modified.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.cluster.determined.decisions import (
        Decision,
        Pool,
        Queued,
        apply,
        decide,
        fair_share,
        fair_share_offers,
        find_fit,
        kubernetes,
        order,
        priority,
        queue,
    )
    from optsched.cluster.determined.state import Agent, Group, State, Task

_STATE: Final = ("Agent", "Group", "State", "Task")

__all__ = [
    "Agent", "Decision", "Group", "Pool", "Queued", "State", "Task", "apply", "decide",
    "fair_share", "fair_share_offers", "find_fit", "kubernetes", "order", "priority", "queue",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "state" if name in _STATE else "decisions"
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
