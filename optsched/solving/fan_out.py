"""Run independent calls in processes of this machine (joblib), or on a dask or ray cluster."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.values import integer, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

_Call: TypeAlias = "tuple[Callable[[Any], Any], int, Any, bool]"
_Ended: TypeAlias = "tuple[int, Any, type[OptschedError] | None, str]"
Cell = TypeVar("Cell")
Value = TypeVar("Value")

ENGINES: Final = ("loky", "dask", "ray")
_WORKERS_S: Final = 10  # in which a cluster must have a worker
_CHECKED_EVERY_S: Final = 0.5  # interval at which a worker looks for its parent


class Engine(NamedTuple):
    """Where calls run: ``loky`` (this machine), ``dask`` or ``ray``, and how many at once.

    The cluster is the one of ``DASK_SCHEDULER_ADDRESS`` or ``RAY_ADDRESS``, otherwise a local one.
    `jobs` None: one call at once with loky, as many as the cluster has cores with the others.
    """

    name: str = "loky"
    jobs: int | None = None


class Outcome(NamedTuple, Generic[Value]):
    """Result of one call, by position of its argument; None with the error if it raised one."""

    position: int
    value: Value
    error: OptschedError | None = None


def fan_out(
    function: Callable[[Cell], Value], cells: Iterable[Cell], engine: Engine | None = None
) -> Generator[Outcome[Value], None, None]:
    """Yield outcomes as calls end; closing the generator ends the calls that run here.

    With one job of loky calls run in this process, and need not be picklable. A wrong engine is an
    `InputError`; the death of a process, or a cluster without workers, an `OptschedError` (with
    dask the deaths are the outcome of one call, and the others go on).
    """
    name, given = engine or Engine()
    one_of("engine", name, ENGINES)
    jobs = 1 if name == "loky" else -1
    jobs = jobs if given is None else integer("jobs", given, 1, 4096)
    here = name == "loky" and jobs == 1
    calls = (
        (function, i, cell if here else pickle.dumps(cell), here) for i, cell in enumerate(cells)
    )
    try:
        with _cluster(name, jobs) as client:
            for index, value, kind, text in (
                _on_dask(client, calls, jobs) if client else _by_joblib(name, calls, jobs)
            ):
                yield Outcome(index, value, None if kind is None else kind(text))
    except (RuntimeError, TimeoutError) as error:  # of loky and dask, about their workers
        text = " ".join(str(error).split())[:200]
        raise OptschedError(f"engine {name}: {type(error).__name__}: {text}") from None


def _by_joblib(name: str, calls: Iterator[_Call], jobs: int) -> Iterator[_Ended]:
    """Yield results of calls, with loky as they end."""
    from joblib import Parallel, delayed, parallel_config  # type: ignore[import-untyped]

    settings: dict[str, Any] = {"n_jobs": jobs, "batch_size": 1, "max_nbytes": None}
    if name == "loky":  # which keeps workers for the next call, if they are of the same place
        settings["return_as"] = "generator_unordered"
        place = os.getpid(), os.getcwd(), tuple(sys.path)
        settings["initializer"], settings["initargs"] = _begin, place
    elif jobs > 0:  # the number of calls in flight; the cluster has its size already
        settings["pre_dispatch"] = jobs
    with parallel_config(backend=name):
        parallel = Parallel(**settings)
    return iter(parallel(delayed(_called)(*call) for call in calls))


def _on_dask(client: Any, calls: Iterator[_Call], jobs: int) -> Iterator[_Ended]:
    """Yield results as calls end, and errors of calls with dead workers: joblib hangs there."""
    from distributed import as_completed

    client.wait_for_workers(1, timeout=_WORKERS_S)
    running = as_completed()  # type: ignore[no-untyped-call]
    positions: dict[str, int] = {}

    def submit(number: int) -> None:
        for call in itertools.islice(calls, number):
            try:
                future = client.submit(_called, *call, pure=False)
            except Exception as error:  # of the scheduler: it has ended
                raise RuntimeError(f"{error}") from None
            positions[future.key] = call[1]
            running.add(future)  # type: ignore[no-untyped-call]

    submit(jobs if jobs > 0 else sum(client.ncores().values()))
    for future in running:
        try:
            found = future.result()
        except Exception as error:
            found = positions[future.key], None, OptschedError, f"{error}"[:200]
        submit(1)
        yield found


def _called(function: Callable[[Any], Any], index: int, cell: Any, here: bool) -> _Ended:
    """Call in a worker; exceptions travel as text, since not all of them can be pickled."""
    try:
        return index, function(cell if here else pickle.loads(cell)), None, ""
    except OptschedError as error:
        kind = InputError if isinstance(error, InputError) else OptschedError
        return index, None, kind, f"{error}"
    except Exception as error:
        return index, None, OptschedError, f"{type(error).__name__}: {error}"


@contextmanager
def _cluster(name: str, jobs: int) -> Iterator[Any]:
    """Connect to the cluster of an engine, or start one here; yield the client of dask."""
    try:
        if name == "loky":
            yield None
        elif name == "dask":
            from dask import config
            from distributed import Client

            address = config.get("scheduler-address", None)
            local = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": "ERROR"}
            local |= {"n_workers": jobs} if jobs > 0 else {}
            try:
                client = Client(**({"address": address} if address else local))  # type: ignore[no-untyped-call]
            except (OSError, ValueError) as error:
                raise InputError(f"DASK_SCHEDULER_ADDRESS: {address!r:.60}: {error}") from None
            with client:
                yield client
        else:
            from ray.util.joblib import register_ray  # type: ignore[import-not-found]

            register_ray()
            yield None
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("dask", "distributed", "ray"):
            raise
        raise MissingExtra(f"engine {name}", name) from None


def _begin(parent: int, *_: object) -> None:
    """Set up a worker of loky: Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process as soon as its parent has ended."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECKED_EVERY_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
