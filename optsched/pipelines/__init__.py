"""Pipelines: fixed orders to compare with, and cost profiles of real models (loaded on use)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.pipelines import generator, models, orders, partition, profiles
    from optsched.pipelines.orders import bubble, gpipe, one_f_one_b, sequential

_MODULES = ("generator", "models", "orders", "partition", "profiles")
_ORDERS = ("bubble", "gpipe", "one_f_one_b", "sequential")

__all__ = [
    "bubble", "generator", "gpipe", "models", "one_f_one_b", "orders", "partition", "profiles",
    "sequential",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"optsched.pipelines.{name}")
    if name in _ORDERS:
        return getattr(import_module("optsched.pipelines.orders"), name)
    raise AttributeError(f"module 'optsched.pipelines' has no attribute {name!r}")
