"""``optsched warmup``, ``version``: compile every kernel; which version this is."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from time import perf_counter
from typing import Annotated

from optsched.cli.options import option


def warmup(
    cache_dir: Annotated[Path | None, option("Put them here, for NUMBA_CACHE_DIR.")] = None,
) -> None:
    """Compile all kernels and rules of policies on all cores; what is compiled stays on disk."""
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
    from optsched.kernels.background import all_entries, compile_all
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
    from optsched.cluster.policies import NAMED

    begin = perf_counter()
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for _ in pool.map(_compile_rule, NAMED):
            pass
    print(f"rules of {len(NAMED)} policies: {perf_counter() - begin:.1f} s")


def _compile_rule(name: str) -> None:
    """Have the rule of a policy, with its default options, on disk."""
    from optsched.cluster import Nodes, simulate, synthetic

    simulate(synthetic(2), name, Nodes(1))


def version() -> None:
    """Print the version."""
    from optsched.version import __version__

    print(__version__)
