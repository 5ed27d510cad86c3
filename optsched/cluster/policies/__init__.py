"""Policies by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.cluster.policy import Policy

_HOME: Final = {
    "afs": "afs:Afs",
    "elastic_fifo": "elastic:ElasticFifo",
    "elastic_sjf": "elastic:ElasticSjf",
    "elastic_srtf": "elastic:ElasticSrtf",
    "entropy": "entropy:Entropy",
    "fair_share": "fair_share:FairShare",
    "fifo": "queue_order:Fifo",
    "finish_time_fairness": "finish_time_fairness:FinishTimeFairness",
    "goodput": "goodput:Goodput",
    "las": "las:Las",
    "lucid": "lucid:Lucid",
    "makespan": "makespan:Makespan",
    "max_min": "max_min:MaxMin",
    "optimus": "optimus:Optimus",
    "priority": "priority:Priority",
    "proportional": "proportional:Proportional",
    "sia": "sia:Sia",
    "sjf": "queue_order:Sjf",
    "srtf": "srtf:Srtf",
    "time_to_target": "time_to_target:TimeToTarget",
}
"""Name -> module and class below this package."""


def names() -> list[str]:
    """Names of the policies that come with the library."""
    return sorted(_HOME)


def get(name: str, **options: Any) -> Policy:
    """A policy by name, with its options.

    Raises
    ------
    InputError
        There is no such policy, or it has no such option, or the value is wrong.
    """
    import difflib

    if name not in _HOME:
        close = difflib.get_close_matches(str(name), _HOME, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(f"policy: there is no {name!r:.60}{hint}; there are: {', '.join(names())}")
    module, _, attribute = _HOME[name].partition(":")
    kind = getattr(import_module(f"optsched.cluster.policies.{module}"), attribute)
    known = sorted(getattr(kind, "options", ()))
    for key in options:
        if key not in known:
            told = ", ".join(known) or "none"
            raise InputError(f"options: {name} has no option {key!r:.60}; it has: {told}")
    policy: Policy = kind(**options)
    return policy
