"""What runs where and in which order on a GPU cluster, as combinatorial optimisation."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from optsched.version import __version__

TYPE_CHECKING = False  # without `typing`: until `optsched.cli.main` runs, Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

    from optsched import (
        bandwidth,
        cluster,
        elastic,
        formats,
        pipelines,
        plots,
        serving,
        stop,
        testing,
    )
    from optsched.errors import (
        CyclicOrder,
        InputError,
        InternalError,
        MissingExtra,
        OptschedError,
        UnsupportedProblem,
    )
    from optsched.limits import Limits
    from optsched.monitor import Monitor, Progress
    from optsched.problems.jobarray import JobArray
    from optsched.problems.jobshop import JobShop
    from optsched.problems.quota import QuotaJob, QuotaPlan
    from optsched.problems.routing import Routing
    from optsched.problems.subset import SubsetChoice
    from optsched.registry import solvers
    from optsched.result import Result
    from optsched.schedule import Arcs, Objective, Resource, Rows, Schedule
    from optsched.solve import solve
    from optsched.verify import Violation, verify
    from optsched.watcher import Watcher

_HOME = {
    "Arcs": "schedule", "CyclicOrder": "errors", "InputError": "errors",
    "InternalError": "errors", "JobArray": "problems.jobarray", "JobShop": "problems.jobshop",
    "Limits": "limits", "MissingExtra": "errors", "Monitor": "monitor", "Objective": "schedule",
    "OptschedError": "errors", "Progress": "monitor", "QuotaJob": "problems.quota",
    "QuotaPlan": "problems.quota", "Resource": "schedule",
    "Result": "result", "Routing": "problems.routing", "Rows": "schedule", "Schedule": "schedule",
    "SubsetChoice": "problems.subset", "UnsupportedProblem": "errors", "Violation": "verify",
    "Watcher": "watcher", "solve": "solve", "solvers": "registry", "verify": "verify",
}  # fmt: skip
_MODULES = (
    "bandwidth", "cluster", "elastic", "formats", "pipelines", "plots", "serving", "stop",
    "testing",
)  # fmt: skip

__all__ = [
    "Arcs", "CyclicOrder", "InputError", "InternalError", "JobArray", "JobShop", "Limits",
    "MissingExtra", "Monitor", "Objective", "OptschedError", "Progress", "QuotaJob",
    "QuotaPlan", "Resource", "Result", "Routing", "Rows", "Schedule", "SubsetChoice",
    "UnsupportedProblem", "Violation", "Watcher", "__version__", "bandwidth", "cluster",
    "elastic", "formats", "pipelines", "plots", "serving", "solve", "solvers", "stop",
    "testing", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: `import optsched` stays instant."""
    if name in _HOME:
        value = getattr(import_module(f"optsched.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"optsched.{name}")
    else:
        raise AttributeError(f"module 'optsched' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Two functions share their names with their modules; an import must not bind the modules."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("solve", "verify") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
