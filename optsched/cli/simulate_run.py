"""Run every policy of ``optsched simulate``, with a bar for what takes over a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster.nodes import Nodes
    from optsched.cluster.packing_table import PackingTable
    from optsched.cluster.policy import Policy
    from optsched.cluster.run import Run
    from optsched.cluster.workload import Workload

_FIRST_AFTER: Final = 1.0  # seconds without a bar


def run_all(
    workload: Workload,
    policies: Mapping[str, Policy],
    nodes: Nodes,
    settings: Mapping[str, Any],
    table: PackingTable | None = None,
    *,
    quiet: bool,
) -> tuple[dict[str, Run], bool]:
    """Runs by policy, in order, and whether all of them were completed (else: Ctrl-C).

    With a packing table the jobs that `lucid` packs slow each other down by it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from optsched.cluster.simulate import simulate

    console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    runs: dict[str, Run] = {}
    begin = time.monotonic()
    try:
        for name, policy in policies.items():
            task = bar.add_task(name, total=len(workload), visible=console.is_terminal)

            def report(now: int, ended: int, jobs: int, task: Any = task) -> None:
                if time.monotonic() - begin >= _FIRST_AFTER:
                    bar.start()
                bar.update(task, completed=ended)

            packs = table is not None and name == "lucid" and settings["timing"] == "event"
            contention = table if packs else None  # with timing="lucid" the policy's twin does it
            since = time.monotonic()
            run = simulate(
                workload, policy, nodes, on_progress=report, contention=contention, **settings
            )
            runs[name] = run
            taken = time.monotonic() - since
            ended = int((run.log.finished >= 0).sum())
            if taken >= _FIRST_AFTER and not console.is_terminal:
                some = "" if ended == len(workload) else f"{ended:,} of "
                console.print(f"{name}: {some}{len(workload):,} jobs in {taken:.1f} s")
            if ended < len(workload):  # the engine hands back what it has
                console.print(f"interrupted: {ended:,} of {len(workload):,} jobs ended in {name}")
                return runs, False
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(runs)} of {len(policies)} policies are done")
        return runs, False
    finally:
        bar.stop()
    return runs, True
