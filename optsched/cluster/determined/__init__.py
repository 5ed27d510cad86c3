"""Schedulers of Determined and Kubernetes as pure functions: a state in, a decision out.

`fair_share`, `priority` and `kubernetes` decide for one pool, `decide` for several; `apply` returns
the state after a decision. Nothing given is ever modified.
"""

from __future__ import annotations

from optsched.cluster.determined.decisions import (
    Decision,
    Pool,
    apply,
    decide,
    fair_share,
    find_fit,
    kubernetes,
    priority,
)
from optsched.cluster.determined.state import Agent, Group, State, Task

__all__ = [
    "Agent", "Decision", "Group", "Pool", "State", "Task", "apply", "decide", "fair_share",
    "find_fit", "kubernetes", "priority",
]  # fmt: skip
