"""The driver of CP-SAT: threads, parameters, limits, solutions and bounds as they are found."""

from __future__ import annotations

import math
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.errors import InputError
from optsched_solvers._portfolio import chosen_cores, confined

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mode": "'solve' (default), or 'bound': raise the lower bound and ignore schedules",
        "symmetry": "break the symmetry of identical jobs (default true)",
        "parameters": "mapping of further CP-SAT parameters",
    }
)

STOP: Final = 0.1
"""Seconds that CP-SAT may take to react to a request to stop."""

_MAX_BOUND: Final = 2**53  # integers up to here are exact in CP-SAT's bounds, which are floats
_NEAR: Final = 1e-3  # a bound above an integer by so little means that integer
_POLL: Final = 0.02  # seconds between two checks of limits and Ctrl-C


def checked_options(limits: Limits) -> bool:
    """Refuse wrong values of `OPTIONS`; returns whether to break symmetry."""
    given = limits.options
    mode, parameters = given.get("mode", "solve"), given.get("parameters", {})
    symmetry = given.get("symmetry", True)
    if mode not in ("solve", "bound"):
        raise InputError(f"options.mode: expected 'solve' or 'bound', got {mode!r:.60}")
    if not isinstance(parameters, dict):
        raise InputError(f"options.parameters: expected a mapping, got {parameters!r:.60}")
    if not isinstance(symmetry, bool):
        raise InputError(f"options.symmetry: expected true or false, got {symmetry!r:.60}")
    return symmetry


class Search(NamedTuple):
    """One of several searches on a model: what distinguishes it."""

    parameters: Mapping[str, Any] = MappingProxyType({})
    """Defaults for CP-SAT; ``options["parameters"]`` of the user replace them."""
    threads: int | None = None
    """Default: one thread on each core, one in all with an iteration limit."""
    cores: tuple[int, ...] | None = None
    """Processor cores of the threads; default: as many as `Limits.workers`."""
    subsolvers: str = ""
    """Further parameters as protobuf text."""


class Answer(NamedTuple):
    """How a call of CP-SAT ended."""

    status: str
    """``"optimal"``, ``"infeasible"``, ``"feasible"`` or ``"unknown"``."""
    deterministic_time: float = 0.0


def solve_cp(
    model: Any,
    limits: Limits,
    monitor: Monitor,
    on_solution: Callable[[Callable[[Any], int]], None],
    on_bound: Callable[[int], object] | None = None,
    *,
    searches: Sequence[Search] = (Search(),),
    reserve: float = STOP,
) -> Answer:
    """Run CP-SAT on a model until a proof or a limit.

    CP-SAT works in other threads, so limits and Ctrl-C are noticed at once. An exception in a
    callback ends the search and is raised here.

    Parameters
    ----------
    limits
        ``iterations`` are 10^-6 of CP-SAT's deterministic seconds, in one thread, which repeats
        exactly; ``options["parameters"]`` replace all other parameters.
    on_solution
        Called with a function that gives the values of variables.
    on_bound
        Called with proved bounds of the objective, which rise; default: report them.
    searches
        Run side by side; the first that has the answer ends all.
    reserve
        Seconds before the end of the time limit at which to stop.
    """
    report = on_bound or (lambda bound: monitor.bound(bound, "cpsat"))
    runs = [_Run(model, limits, monitor.remaining - reserve, search) for search in searches]
    idle = threading.Event()
    threads = [
        threading.Thread(
            target=run.work, args=(on_solution, report, idle), name="cp-sat", daemon=True
        )
        for run in runs
    ]
    for thread in threads:
        thread.start()

    def is_over() -> bool:
        ended = [run for run, thread in zip(runs, threads, strict=True) if not thread.is_alive()]
        return len(ended) == len(runs) or not all(run.is_open for run in ended)

    try:
        while not (is_over() or monitor.should_stop() or monitor.remaining < reserve):
            idle.wait(_POLL)
            idle.clear()
            # CP-SAT does not report its deterministic time while it works: the clock replaces it
            monitor.advance(round(_POLL * 1e6))
    finally:
        while any(thread.is_alive() for thread in threads):
            for run in runs:
                run.solver.stop_search()
            idle.wait(_POLL)
            idle.clear()
    for run in runs:
        if run.failure is not None:
            raise run.failure
    return next((run.answer for run in runs if not run.is_open), runs[0].answer)


class _Run:
    """One search, in its thread."""

    def __init__(self, model: Any, limits: Limits, seconds: float, search: Search) -> None:
        from ortools.sat.python import cp_model

        self.model, self.cp_model = model, cp_model
        self.cores = chosen_cores(limits.workers) if search.cores is None else search.cores
        self.answer = Answer("unknown")
        self.failure: BaseException | None = None
        self.solver = cp_model.CpSolver()
        threads = 1 if limits.iterations is not None else max(1, len(self.cores))
        self.solver.parameters.num_workers = search.threads or threads
        self.solver.parameters.merge_text_format(search.subsolvers)
        # CP-SAT's handler aborts the process when the signal reaches a thread other than its own
        self.solver.parameters.catch_sigint_signal = False
        self.solver.parameters.random_seed = limits.seed
        if limits.iterations is not None:
            self.solver.parameters.max_deterministic_time = limits.iterations * 1e-6
        if limits.time_limit is not None:
            self.solver.parameters.max_time_in_seconds = max(0.0, seconds)
        for name, value in {**search.parameters, **limits.options.get("parameters", {})}.items():
            try:
                setattr(self.solver.parameters, name, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(
                    f"options.parameters: CP-SAT has no {name} = {value!r:.60}"
                ) from None

    @property
    def is_open(self) -> bool:
        """Whether nothing is proved and nothing has failed yet."""
        return self.failure is None and self.answer.status not in ("optimal", "infeasible")

    def work(
        self,
        on_solution: Callable[[Callable[[Any], int]], None],
        on_bound: Callable[[int], object],
        idle: threading.Event,
    ) -> None:
        """Call CP-SAT; sets `idle` at the end."""
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                run.guarded(on_solution, self.value)

        def bounded(bound: float) -> None:
            if abs(bound) <= _MAX_BOUND:
                on_bound(math.ceil(bound - _NEAR))

        def solve() -> None:
            with confined(self.cores):  # threads of CP-SAT inherit it
                status = self.solver.solve(self.model, OnSolution())
            self._finish(self.solver.status_name(status).lower())
            if self.answer.status == "optimal":
                bounded(self.solver.best_objective_bound)

        self.solver.best_bound_callback = lambda bound: self.guarded(bounded, bound)
        self.guarded(solve)
        idle.set()

    def guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in a thread of CP-SAT, which must not see an exception."""
        try:
            function(*arguments)
        except BaseException as error:
            self.failure = self.failure or error
            self.solver.stop_search()

    def _finish(self, status: str) -> None:
        if status == "model_invalid":
            if self.model.validate():
                raise InputError("cpsat: times are beyond CP-SAT's integer range; scale them down")
            reason = self.solver.solution_info().strip() or "it gives no reason"
            raise InputError(f"options.parameters: CP-SAT refuses them ({reason:.200})")
        self.answer = Answer(status, self.solver.response_proto.deterministic_time)
