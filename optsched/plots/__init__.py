"""Pictures of schedules, benchmarks and simulations.

Functions `gantt`, `jct_cdf`, `jct_decomposition`, `utilisation_over_time`, `pareto`; modules
`html`, `anytime`, `jct`, `utilisation` and `simulation`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# shares its name with its module: bound here, before anyone imports the module
from optsched.plots.gantt import gantt

if TYPE_CHECKING:
    from optsched.plots.front import pareto
    from optsched.plots.jct import jct_cdf, jct_decomposition
    from optsched.plots.utilisation import utilisation_over_time

_HOME = {
    "jct_cdf": "jct", "jct_decomposition": "jct", "utilisation_over_time": "utilisation",
    "pareto": "front",
}  # fmt: skip

__all__ = ["gantt", "jct_cdf", "jct_decomposition", "pareto", "utilisation_over_time"]


def __getattr__(name: str) -> Any:
    """Load functions on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.plots' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.plots.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
