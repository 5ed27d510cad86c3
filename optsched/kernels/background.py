"""Compile entries in separate processes, which finish even if the calling process has ended.

All processes of a machine share the work: they lock a module of kernels each, and write one log.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.kernels.compile import Entry, entries, folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PACKAGES = ("optsched", "optsched_solvers")
LOCKS, LOG = "optsched-compiling.lock", "optsched-compiling.log"
_WATCH = 0.02  # seconds between two looks

_workers: list[subprocess.Popen[bytes]] = []  # not joined; polled once at exit to reap them


def compile_all(
    requested: Sequence[Entry], processes: int, watch: Callable[[int], object] = lambda ready: None
) -> None:
    """Load or compile entries in this process; return when all are there.

    `requested` is in the order in which they are needed; `processes` work side by side on what is
    not on disk; `watch` is called again and again with the number of entries that are there.
    """
    missing = [one for one in requested if not one.ready]
    workers = [_worker(missing) for _ in range(min(processes, len(missing))) if folder()]
    _workers[:] = [one for one in _workers if one.poll() is None] + workers
    while missing and any(worker.poll() is None for worker in workers):
        watch(len(requested) - len(missing))
        time.sleep(_WATCH)
        missing = [one for one in missing if not one.ready]
    for one in missing:  # there is no folder, or a worker was killed
        one.prepare()
    watch(len(requested))


def all_entries(packages: Sequence[str] = PACKAGES) -> tuple[list[Entry], list[str]]:
    """All entries of packages, and why modules that have some could not be imported."""
    found: dict[Entry, None] = {}
    failed = []
    for module in kernel_modules(packages):
        try:
            found |= dict.fromkeys(entries(module))
        except ImportError as error:  # an optional dependency: its solver names it when called
            failed.append(f"{module}: {' '.join(str(error).split())}")
    return list(found), failed


def kernel_modules(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Modules that have kernels: those that import `optsched.kernels.compile`."""
    found = []
    for package in packages:
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations is None:
            found.append(package)  # a module
        for root in () if spec is None else spec.submodule_search_locations or ():
            for path in Path(root).rglob("*.py"):
                if f"from {Entry.__module__} import" in path.read_text("utf-8"):
                    inside = path.relative_to(root).with_suffix("")
                    found.append(".".join((package, *inside.parts)))
    return sorted(found)


@atexit.register
def _leave_workers() -> None:
    """They go on without this process, on purpose: Python need not warn of it."""
    for worker in _workers:
        if worker.poll() is None:
            worker.returncode = 0


def _worker(requested: Sequence[Entry]) -> subprocess.Popen[bytes]:
    """A process that compiles; a signal to this one does not reach it."""
    with open(folder() / LOG, "ab") as log:  # type: ignore[operator]
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *(one.label for one in requested)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip


def main(labels: Sequence[str]) -> None:
    """Compile entries not locked by another process, then wait for the others."""
    gc.disable()  # the compiler makes much that lives as long as this process
    with suppress(AttributeError, OSError):  # the thread that started it may be confined to a core
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    for wait in (False, True):
        for label in labels:
            with _alone(label.partition(":")[0], wait) as mine:
                one = entries(label)[0]
                if mine and not (one.stored or one.ready):  # ready: compiled, but the disk is full
                    begun = time.process_time()
                    one.prepare()
                    took = time.process_time() - begun
                    print(f"{time.strftime('%F %T')} {label}: {took:.1f} CPU s", flush=True)


@contextmanager
def _alone(module: str, wait: bool) -> Iterator[bool]:
    """Be the only process that compiles this module; yields whether that is so."""
    try:
        import fcntl
    except ImportError:  # Windows: what two compile at once is stored twice
        yield True
        return
    with open(folder() / LOCKS, "ab") as file:  # type: ignore[operator]
        place: Any = (1, sum(module.encode()) * len(module))  # one byte a module
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), *place)
        except OSError:
            yield False
            return
        yield True  # closing gives it back


if __name__ == "__main__":
    main(sys.argv[1:])
