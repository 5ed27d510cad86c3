"""Pipelines: hand-made schedules to compare with, and cost profiles of real models.

Loaded on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.pipelines import generator, models, partition, profiles
    from optsched.pipelines.bidirectional import chimera
    from optsched.pipelines.equal_stages import uniform
    from optsched.pipelines.formulas import NAMES, bubble, idle_share
    from optsched.pipelines.interleaving import interleaved
    from optsched.pipelines.orders import gpipe, one_f_one_b, vanilla
    from optsched.pipelines.parking import bpipe
    from optsched.pipelines.places import wrapped, zigzag
    from optsched.pipelines.waves import hanayo
    from optsched.pipelines.zero_bubble import zb_h1, zb_h2

_MODULES = ("generator", "models", "partition", "profiles")
_HOME = {
    "NAMES": "formulas", "bpipe": "parking", "bubble": "formulas", "chimera": "bidirectional",
    "gpipe": "orders", "hanayo": "waves", "idle_share": "formulas", "interleaved": "interleaving",
    "one_f_one_b": "orders", "uniform": "equal_stages", "vanilla": "orders", "wrapped": "places",
    "zb_h1": "zero_bubble", "zb_h2": "zero_bubble", "zigzag": "places",
}  # fmt: skip

__all__ = [
    "NAMES", "bpipe", "bubble", "chimera", "generator", "gpipe", "hanayo", "idle_share",
    "interleaved", "models", "one_f_one_b", "partition", "profiles", "uniform", "vanilla",
    "wrapped", "zb_h1", "zb_h2", "zigzag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"optsched.pipelines.{name}")
    if name in _HOME:
        return getattr(import_module(f"optsched.pipelines.{_HOME[name]}"), name)
    raise AttributeError(f"module 'optsched.pipelines' has no attribute {name!r}")
