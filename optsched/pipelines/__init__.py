"""Pipelines: hand-made schedules to compare with, and cost profiles of real models.

Loaded on use.

Examples
--------
>>> from optsched import pipelines
>>> job = optsched.JobArray([[1, 1]], [[2, 2]], micro_batches=4)
>>> optsched.verify(pipelines.one_f_one_b(job), problem=job)
[]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.pipelines import generator, models, profiles
    from optsched.pipelines.chunks import hanayo, interleaved, wrapped, zigzag
    from optsched.pipelines.cuts import Partition, balanced, partition
    from optsched.pipelines.equal_stages import NAMES, bubble, idle_share, uniform
    from optsched.pipelines.orders import chimera, gpipe, one_f_one_b, vanilla, zb_h1, zb_h2

_MODULES = ("generator", "models", "profiles")
_HOME = {
    **dict.fromkeys(("hanayo", "interleaved", "wrapped", "zigzag"), "chunks"),
    **dict.fromkeys(("Partition", "balanced", "partition"), "cuts"),
    **dict.fromkeys(("NAMES", "bubble", "idle_share", "uniform"), "equal_stages"),
    **dict.fromkeys(("chimera", "gpipe", "one_f_one_b", "vanilla", "zb_h1", "zb_h2"), "orders"),
}

__all__ = [
    "NAMES", "Partition", "balanced", "bubble", "chimera", "generator", "gpipe",
    "hanayo", "idle_share", "interleaved", "models", "one_f_one_b", "partition",
    "profiles", "uniform", "vanilla", "wrapped", "zb_h1", "zb_h2", "zigzag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"optsched.pipelines.{name}")
    if name in _HOME:
        return getattr(import_module(f"optsched.pipelines.{_HOME[name]}"), name)
    raise AttributeError(f"module 'optsched.pipelines' has no attribute {name!r}")
