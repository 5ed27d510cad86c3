"""What runs where and in which order on a GPU cluster, as combinatorial optimisation."""

from __future__ import annotations

from importlib import import_module

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
        plan,
        plots,
        serving,
        testing,
    )
    from optsched.arraypipe.job import Job as Job
    from optsched.arraypipe.options import RunConfig as RunConfig
    from optsched.arraypipe.trainer import ArrayTrainer as ArrayTrainer
    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.errors import (
        CyclicOrder,
        Infeasible,
        InputError,
        InternalError,
        MissingExtra,
        OptschedError,
        UnsupportedProblem,
    )
    from optsched.model.schedule import Arcs, Csr, Goal, Objective, Resource, Schedule
    from optsched.model.verify import Violation, verify
    from optsched.problems.jobarray.problem import JobArray
    from optsched.problems.jobshop.problem import JobShop
    from optsched.problems.quota.problem import QuotaJob, QuotaPlan
    from optsched.solving import stop
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.progress import Progress
    from optsched.solving.result import Result
    from optsched.solving.solve import solve
    from optsched.solving.solver import solvers
    from optsched.version import show_versions

_MODULE_OF = {
    name: module
    for module, names in {
        "arraypipe": "ArrayTrainer Job RunConfig",  # not in `__all__`: they need torch
        "errors": "CyclicOrder Infeasible InputError InternalError MissingExtra OptschedError "
        "UnsupportedProblem",
        "model.schedule": "Arcs Goal Objective Resource Csr Schedule",
        "model.verify": "verify",
        "model.violation": "Violation",
        "bandwidth.placement.problem": "GpuPlacement",
        "problems.jobarray.problem": "JobArray",
        "problems.jobshop.problem": "JobShop",
        "problems.quota.problem": "QuotaJob QuotaPlan",
        "solving.limits": "Limits",
        "solving.monitor": "Monitor",
        "solving.result": "Result",
        "solving.solve": "solve",
        "solving.solver": "solvers",
        "solving.progress": "Progress",
        "version": "show_versions",
    }.items()
    for name in names.split()
}
_MODULES = (
    "bandwidth", "cluster", "elastic", "formats", "pipelines", "plan", "plots", "serving",
    "testing",
)  # fmt: skip

__all__ = [
    "Arcs",
    "Csr",
    "CyclicOrder",
    "Goal",
    "GpuPlacement",
    "Infeasible",
    "InputError",
    "InternalError",
    "JobArray",
    "JobShop",
    "Limits",
    "MissingExtra",
    "Monitor",
    "Objective",
    "OptschedError",
    "Progress",
    "QuotaJob",
    "QuotaPlan",
    "Resource",
    "Result",
    "Schedule",
    "UnsupportedProblem",
    "Violation",
    "__version__",
    "bandwidth",
    "cluster",
    "elastic",
    "formats",
    "pipelines",
    "plan",
    "plots",
    "serving",
    "show_versions",
    "solve",
    "solvers",
    "stop",
    "testing",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: `import optsched` stays instant."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"optsched.{_MODULE_OF[name]}"), name)
    elif name == "stop":
        value = import_module("optsched.solving.stop")
    elif name in _MODULES:
        value = import_module(f"optsched.{name}")
    else:
        raise AttributeError(f"module 'optsched' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
