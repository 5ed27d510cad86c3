"""Policies by name."""

from __future__ import annotations

import sys
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.io.values import did_you_mean, format_value

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from optsched.cluster.world.policy import Policy

_MODULES: Final = {
    "allocation": "optsched.cluster.policies.allocation:Allocation",
    "elastic": "optsched.cluster.policies.elastic:Elastic",
    "entropy": "optsched.cluster.policies.elastic:Entropy",
    "fair_share": "optsched.cluster.determined.policies:FairShare",
    "fifo": "optsched.cluster.policies.rigid:Fifo",
    "las": "optsched.cluster.policies.rigid:Las",
    "lucid": "optsched.cluster.policies.lucid:Lucid",
    "priority": "optsched.cluster.determined.policies:Priority",
    "sia": "optsched.cluster.policies.sia:Sia",
    "sjf": "optsched.cluster.policies.rigid:Sjf",
    "srtf": "optsched.cluster.policies.rigid:Srtf",
    "time_to_target": "optsched.cluster.policies.time_to_target:TimeToTarget",
}
"""Name -> module and class."""

NAMED: Final = tuple(_MODULES)
"""Names of the policies of the library."""


_RENAMED: Final = {
    "afs": "elastic with surplus=marginal",
    "elastic_fifo": "elastic",
    "elastic_sjf": "elastic with order=sjf",
    "elastic_srtf": "elastic with order=srtf, clairvoyant=True, preempt=order",
    "finish_time_fairness": "allocation with objective=finish_time_fairness",
    "goodput": "allocation with objective=goodput",
    "makespan": "allocation with objective=makespan",
    "max_min": "allocation with objective=max_min",
    "optimus": "elastic with surplus=marginal",
    "proportional": "allocation with objective=proportional",
}
"""Names of earlier releases -> what to take."""


GROUP: Final = "optsched.policies"
"""Entry points of this group are policies of other packages: name -> class, or policy."""


def _others() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms that our own policies need not pay

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _MODULES}


def names() -> list[str]:
    """Names of all policies: those of the library and of installed packages."""
    return sorted({*_MODULES, *_others()})


def get(name: str, **options: Any) -> Policy:
    """A policy by name, or by ``module:Class`` (a class, policy or rule function), with options.

    Raises
    ------
    InputError
        There is no such policy, it cannot be loaded, it has no such option, or the value is wrong.
    """
    kind = _kind(name)
    known = sorted(getattr(kind, "options", ()))
    for key in options:
        if key not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"options: {name} has no option {key!r:.60}; it has: {listed}")
    if isinstance(kind, type):
        try:
            kind = kind(**options)
        except TypeError as error:
            raise InputError(f"policy: {name!r:.60} cannot be made: {error}") from error
    elif isinstance(kind, FunctionType):
        from optsched.cluster.world.compiled import compiled

        kind = compiled(kind)
    if not callable(getattr(kind, "decide", None)):
        raise InputError(f"policy: {name!r:.60} has no method `decide`, got {format_value(kind)}")
    policy: Policy = kind
    return policy


def _kind(name: str) -> Any:
    """The class of a name."""
    if name in _MODULES:
        module, _, attribute = _MODULES[name].partition(":")
        return getattr(import_module(module), attribute)
    if ":" in name:
        return _from_module(name)
    others = _others()
    if name not in others:
        if name in _RENAMED:
            raise InputError(f"policy: {name!r} is now {_RENAMED[name]}")
        known = names()
        hint = did_you_mean(name, known)
        raise InputError(
            f"policy: there is no {name!r:.60}{hint}; there are: {', '.join(known)}, and "
            "module:Class for any other"
        )
    try:
        return others[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"policy: {name!r:.60} of the entry points {GROUP!r} cannot be loaded: {error}"
        ) from None


def _from_module(name: str) -> Any:
    """The object ``module:Class``; modules of the current folder are found too."""
    module, _, attribute = name.partition(":")
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # the module is the caller's: whatever breaks in it
        message = f"{type(error).__name__}: {error}"
        raise InputError(f"policy: {name!r:.60} cannot be loaded: {message}") from error
    finally:
        sys.path[:] = before
