"""Branch and bound in two modes: failure-directed proofs, and the Giffler-Thompson tree."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.errors import InputError, UnsupportedProblem
from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers.shop.rules import supported_graph, supported_objective, try_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

FAILURE_DIRECTED: Final = "failure-directed"
GIFFLER_THOMPSON: Final = "giffler-thompson"
MODES: Final = (FAILURE_DIRECTED, GIFFLER_THOMPSON)

SEARCHES: Final = ("depth", "best")
MOST_WIDTH: Final = 10**6

PROOF = (
    "optsched.kernels.longest_path",
    "shop.proof.failure_directed",
    "shop.proof.tree_search:run",
)
"""What failure-directed search loads."""


class BranchAndBound:
    """Exact search over the orders on the machines; one iteration is one node of the tree.

    Mode ``"failure-directed"`` (Vilím, Laborie & Shaw 2015, with edge finding) is the one that
    proves. Mode ``"giffler-thompson"`` is the textbook's and ArrayPipe's Algorithm 1, made exact:
    the reference and the teaching version, for up to about ten jobs on five machines. With
    ``width`` it is a beam, with ``width=1`` the algorithm as published: one node per level is kept,
    and nothing is proved beyond the bound of the root.
    """

    name = "branch_and_bound"
    options: Mapping[str, str] = MappingProxyType(
        {
            "mode": '"failure-directed" (default) or "giffler-thompson"',
            "polish": "failure-directed: look for schedules by tabu search too (default true)",
            "search": 'giffler-thompson: "depth" first (default) or "best" bound first',
            "width": "giffler-thompson: best nodes kept per level, no way back; 1 = Algorithm 1",
            "as_printed": "giffler-thompson with width: of equal nodes keep the last, as published",
            "symmetry": "giffler-thompson: order identical jobs (default true)",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration (makespan) of any graph; giffler-thompson takes no gangs."""
        return supported_objective(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a proof or a limit, from the monitor's schedule or from the rules'."""
        chosen = _checked(limits.options)
        graph = problem.graph()
        if chosen.mode == FAILURE_DIRECTED:
            if not load(monitor, *PROOF):
                if monitor.solution is None and supported_graph(graph):
                    try_rules(graph, limits, monitor)  # a first answer needs no kernels
                return Result("unknown")
            from optsched_solvers.shop.proof import failure_directed

            return failure_directed.search(graph, limits, monitor, polish=chosen.polish)
        support = supported_graph(graph)
        if not support:
            raise UnsupportedProblem(
                f"{self.name} in mode {GIFFLER_THOMPSON} does not solve this problem: "
                f'{support.reason}; mode "{FAILURE_DIRECTED}" does'
            )
        if not load(
            monitor,
            "optsched.kernels.longest_path",
            "literature.giffler_thompson_tree",
            "literature.giffler_thompson",
        ):
            return Result("unknown")
        from optsched_solvers.literature import giffler_thompson

        return giffler_thompson.search(
            graph, limits, monitor, order=chosen.search, width=chosen.width,
            as_printed=chosen.as_printed, symmetry=chosen.symmetry,
        )  # fmt: skip


class _Chosen(NamedTuple):
    """Checked options."""

    mode: str = FAILURE_DIRECTED
    polish: bool = True
    search: str = "depth"
    width: int = 0
    as_printed: bool = False
    symmetry: bool = True


def _checked(options: Mapping[str, Any]) -> _Chosen:
    """The options, each of its type; those of the other mode are refused."""
    chosen = _Chosen(**options)
    for key, legal in (("mode", MODES), ("search", SEARCHES)):
        if getattr(chosen, key) not in legal:
            told = f"expected one of {', '.join(legal)}, got {options[key]!r:.60}"
            raise InputError(f"options.{key}: {told}")
    for key in ("polish", "as_printed", "symmetry"):
        if not isinstance(getattr(chosen, key), bool):
            raise InputError(f"options.{key}: expected true or false, got {options[key]!r:.60}")
    width = chosen.width
    if isinstance(width, bool) or not isinstance(width, int) or not 0 <= width <= MOST_WIDTH:
        raise InputError(
            f"options.width: expected an integer in 0..{MOST_WIDTH}, got {width!r:.60}"
        )
    foreign = ("polish",) if chosen.mode == GIFFLER_THOMPSON else _Chosen._fields[2:]
    for key in foreign:
        if key in options:
            other = MODES[1 - MODES.index(chosen.mode)]
            raise InputError(f'options.{key}: belongs to mode "{other}", not "{chosen.mode}"')
    if chosen.as_printed and not width:
        raise InputError("options.as_printed: needs a width, such as 1 (Algorithm 1)")
    return chosen
