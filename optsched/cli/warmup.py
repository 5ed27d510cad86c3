"""``optsched warmup``: compile every kernel, so that the first solve need not."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from time import perf_counter

KERNELS = "optsched.compiled"
PACKAGES = (
    "optsched",
    "optsched.arraypipe.states",
    "optsched.bandwidth",
    "optsched.cluster",
    "optsched_solvers",
    "optsched_solvers.quota",
)


def warmup() -> None:
    """Compile the kernels, so that the first solve need not; prints seconds per module."""
    total, failed = perf_counter(), 0
    for name in ("numba", *kernel_modules()):
        begin = perf_counter()
        try:
            import_module(name)
            note = ""
        except ImportError as error:  # an optional dependency: its solver says so when asked
            failed += 1
            note = f" (not loaded: {' '.join(str(error).split())})"
        took = perf_counter() - begin
        print(f"{name.removeprefix('optsched_solvers.')}: {took:.2f} s{note}", flush=True)
    print(f"all: {perf_counter() - total:.2f} s" + f", {failed} not loaded" * bool(failed))


def kernel_modules() -> list[str]:
    """Modules that compile when imported: those that use `optsched.compiled`."""
    found = []
    for package in PACKAGES:
        spec = find_spec(package)
        folders = [] if spec is None else spec.submodule_search_locations
        for module in iter_modules(folders, f"{package}."):
            there = module.module_finder.find_spec(module.name, None)
            get_source = getattr(there and there.loader, "get_source", None)
            source = get_source(module.name) if get_source else None
            if source and f"from {KERNELS} import" in source:
                found.append(module.name)
    return sorted(found)
