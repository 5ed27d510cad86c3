"""``optsched warmup``."""

from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from time import perf_counter
from typing import Annotated

from optsched.cli.options import AsJson, option


def warmup(
    cache_dir: Annotated[Path | None, option("Folder, to be used as NUMBA_CACHE_DIR.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile all kernels and rules of policies on all cores and keep them on disk.

    Example: optsched warmup --cache-dir /var/cache/optsched
    """
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
    from optsched.solving.fan_out import Engine, fan_out
    from optsched.solving.limits import available_cores

    if folder() is None:
        raise InputError("there is no folder for compiled kernels that can be written")
    begin, (entries, failed) = perf_counter(), all_entries()
    with Bar() as bar:
        compile_all(entries, available_cores(), bar.task("compiling kernels", len(entries)))
    seconds = [perf_counter() - begin]
    if not as_json:
        print(*(f"not loaded: {reason}\n" for reason in failed), sep="", end="")
        print(f"{len(entries)} kernels in {folder()}: {seconds[0]:.1f} s")
    from optsched.cluster.policies import NAMED

    begin = perf_counter()
    for outcome in fan_out(_compile_rule, NAMED, Engine("loky", available_cores())):
        if outcome.error is not None:
            raise outcome.error
    seconds.append(perf_counter() - begin)
    if as_json:
        found = {"kernels": len(entries), "policies": len(NAMED), "folder": str(folder())}
        print(json.dumps({**found, "seconds": seconds, "not_loaded": list(map(str, failed))}))
    else:
        print(f"rules of {len(NAMED)} policies: {seconds[1]:.1f} s")


def _compile_rule(name: str) -> None:
    """Compile the rule of a policy with its default options."""
    from optsched.cluster import Nodes, simulate, synthetic

    simulate(synthetic(2), name, Nodes(1))
