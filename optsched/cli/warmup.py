"""``optsched warmup``, ``version``: compile every kernel; which version this is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from optsched.cli.options import option

if TYPE_CHECKING:
    from optsched.kernels.compile import Entry

KERNELS = "optsched.kernels.compile"
PACKAGES = ("optsched", "optsched_solvers")


def warmup(
    cache_dir: Annotated[Path | None, option("Put them here, for NUMBA_CACHE_DIR.")] = None,
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
    from optsched.cli.progress import Bar
    from optsched.kernels.background import compile_all
    from optsched.kernels.compile import folder
    from optsched.solving.limits import available_cores

    if folder() is None:
        raise InputError("there is no folder for compiled kernels that can be written")
    begin, (wanted, failed) = perf_counter(), all_entries()
    with Bar() as bar:
        compile_all(wanted, available_cores(), bar.task("compiling kernels", len(wanted)))
    for reason in failed:
        print(f"not loaded: {reason}")
    print(f"{len(wanted)} kernels in {folder()}: {perf_counter() - begin:.1f} s")


def version() -> None:
    """Print the version."""
    from optsched.version import __version__

    print(__version__)


def all_entries() -> tuple[list[Entry], list[str]]:
    """All kernels that Python calls, and why modules that have some could not be imported."""
    from optsched.kernels.compile import entries

    found: dict[Entry, None] = {}
    failed = []
    for module in kernel_modules():
        try:
            found |= dict.fromkeys(entries(module))
        except ImportError as error:  # an optional dependency: its solver says so when asked
            failed.append(f"{module}: {' '.join(str(error).split())}")
    return list(found), failed


def kernel_modules() -> list[str]:
    """Modules that have kernels: those that use `optsched.kernels.compile`."""
    found = []
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for path in Path(folder).rglob("*.py"):
                if f"from {KERNELS} import" in path.read_text("utf-8"):
                    inside = path.relative_to(folder).with_suffix("")
                    found.append(".".join((package, *inside.parts)))
    return sorted(found)
