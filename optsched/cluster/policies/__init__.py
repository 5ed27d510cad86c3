"""Policies by name."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError, OptschedError
from optsched.io.values import did_you_mean, format_value

if TYPE_CHECKING:
    from collections.abc import Iterable
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


_OUTSIDE_LISTS: Final = re.compile(r",(?![^\[]*\])")
"""Commas that separate policies or options."""

GROUP: Final = "optsched.policies"
"""Entry points of this group are policies of other packages: name -> class, or policy."""


def _others() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms that our own policies need not pay

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _MODULES}


def names() -> list[str]:
    """List the names of all policies: those of the library and of installed packages.

    Examples
    --------
    >>> "fifo" in optsched.cluster.policies.names()
    True
    """
    return sorted({*_MODULES, *_others()})


def variants(texts: Iterable[str]) -> list[str]:
    """Split texts ``NAME,NAME:KEY=VALUE,KEY=VALUE,...`` into policies with their options.

    Examples
    --------
    >>> optsched.cluster.policies.variants(["fifo,elastic:order=sjf,preempt=order"])
    ['fifo', 'elastic:order=sjf,preempt=order']
    """
    found: list[str] = []
    for text in (part for given in texts for part in _OUTSIDE_LISTS.split(given)):
        if found and "=" in text and ":" not in text.partition("=")[0]:
            found[-1] += f",{text.strip()}"
        elif text.strip():
            found.append(text.strip())
    if not found:
        raise InputError("policy: expected names, separated by commas")
    return list(dict.fromkeys(found))


def _options(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``NAME:KEY=VALUE,...``; values are JSON, or texts."""
    name, found = text, dict[str, Any]()
    if "=" in text:
        name = text.partition("=")[0].rpartition(":")[0]
        for pair in _OUTSIDE_LISTS.split(text[len(name) + 1 :]):
            key, equals, value = pair.partition("=")
            if not name or not equals or key in found:
                raise InputError(
                    f"policy: expected NAME:KEY=VALUE,KEY=VALUE, each key once, got {text!r:.60}"
                )
            try:
                found[key] = json.loads(value)
            except ValueError:
                found[key] = value
    return name, found


def get(name: str, **options: Any) -> Policy:
    """Make a policy by name, or by ``module:Class`` (class, policy or rule), with options.

    ``NAME:KEY=VALUE,...`` is a variant with these options, which is also its name in reports.

    Raises
    ------
    InputError
        There is no such policy, it cannot be loaded, it has no such option, or the value is wrong.

    Examples
    --------
    >>> optsched.cluster.policies.get("elastic", order="sjf").order
    'sjf'
    """
    if not isinstance(name, str):
        raise InputError(f"policy: expected a name, got {format_value(name)}")
    label, (name, given) = name, _options(name)
    options |= given
    kind = _kind(name)
    known = getattr(kind, "options", ())
    if not isinstance(known, (tuple, list)) or not all(isinstance(key, str) for key in known):
        what = f"expected a tuple of names as its `options`, got {format_value(known)}"
        raise InputError(f"policy: {name!r:.60}: {what}")
    for key in options:
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise InputError(f"options: {name} has no option {key!r:.60}; it has: {listed}")
    if isinstance(kind, type):
        try:
            kind = kind(**options)
            if given:
                kind.name = label
        except OptschedError:
            raise
        except (Exception, SystemExit) as error:  # the class is the caller's
            message = f"{type(error).__name__}: {error}"
            raise InputError(f"policy: {name!r:.60} cannot be made: {message}") from error
    elif options:
        raise InputError(f"options: {name} is no class, it takes none; name its class")
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
    except (Exception, SystemExit) as error:  # the module is the caller's: whatever breaks in it
        hint = "; name the module, without folder and .py" if module.endswith(".py") else ""
        message = f"{type(error).__name__}: {error}{hint}"
        raise InputError(f"policy: {name!r:.60} cannot be loaded: {message}") from error
    finally:
        sys.path[:] = before
