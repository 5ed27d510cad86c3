"""``optsched warmup``: compile every kernel, so that no solve need."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003  (typer looks at it)
from pkgutil import iter_modules
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optsched.compiled import Entry

KERNELS = "optsched.compiled"
PACKAGES = (
    "optsched",
    "optsched.arraypipe.states",
    "optsched.bandwidth",
    "optsched.cluster",
    "optsched.serving",
    "optsched_solvers",
    "optsched_solvers.quota",
)


def warmup(
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Put them here, for machines where NUMBA_CACHE_DIR names this folder."),
    ] = None,
) -> None:
    """Compile all kernels on all cores, so that no solve need; what is compiled stays on disk."""
    from optsched.errors import InputError

    if cache_dir is not None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cache_dir: {error}") from None
        if not os.access(cache_dir, os.W_OK):
            raise InputError(f"cache_dir: {cache_dir} cannot be written")
        os.environ["NUMBA_CACHE_DIR"] = str(cache_dir.resolve())
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from optsched.compiled import folder
    from optsched.compiling import compile_all
    from optsched.limits import available_cores

    if folder() is None:
        raise InputError("there is no folder for compiled kernels that can be written")
    begin, (wanted, failed) = perf_counter(), all_entries()
    columns = TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("", total=len(wanted))
        compile_all(wanted, available_cores(), lambda there: line.update(task, completed=there))
    for reason in failed:
        print(f"not loaded: {reason}")
    print(f"{len(wanted)} kernels in {folder()}: {perf_counter() - begin:.1f} s")


def all_entries() -> tuple[list[Entry], list[str]]:
    """All kernels that Python calls, and why modules that have some could not be imported."""
    from optsched.compiled import entries

    found: dict[Entry, None] = {}
    failed = []
    for module in kernel_modules():
        try:
            found |= dict.fromkeys(entries(module))
        except ImportError as error:  # an optional dependency: its solver says so when asked
            failed.append(f"{module}: {' '.join(str(error).split())}")
    return list(found), failed


def kernel_modules() -> list[str]:
    """Modules that have kernels: those that use `optsched.compiled`."""
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
