"""Persistent worker processes, one a slot, which import torch once and train many jobs."""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MOST_CRASHES: Final = 10  # of a job's workers in a row, without a pass between
_NEVER: Final = 2**62


class Join(NamedTuple):
    """What a worker needs to become a rank of a job."""

    rank: int
    workers: int
    device: str
    store: str  # file by which the ranks find each other
    folder: str  # of the job's checkpoint
    done: int  # passes in the scheduler's log; the checkpoint may have one more


class Order(NamedTuple):
    """The next pass: its number from 0, and lists by rank."""

    number: int
    samples: list[int]
    batches: list[int]
    rate: float  # factor of the learning rates


class Event(NamedTuple):
    """A message of a worker.

    ``"joined"`` (`Member.joined`), ``"passed"`` (its record), ``"stopped"`` (part of the pass that
    is done), ``"failed"`` (why), or ``"died"``.
    """

    slot: int
    kind: str
    content: Any = None


class StopFile:
    """Agree on the last step of all ranks of a job.

    A rank notes every step before it starts it. The scheduler sets the limit to the largest step
    noted, under a lock: a rank that stopped earlier would leave the others in an all-reduce.
    """

    def __init__(self, path: str, ranks: int) -> None:
        self.path, self.ranks = path, ranks
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def reset(self) -> None:
        """Begin a pass: no step is noted, and there is no limit."""
        os.pwrite(self._handle, struct.pack(f"{self.ranks + 1}q", _NEVER, *[-1] * self.ranks), 0)

    def set_limit(self) -> None:
        """Stop all ranks after the largest step that one of them has started."""
        with self._locked():
            _, *noted = struct.unpack(
                f"{self.ranks + 1}q", os.pread(self._handle, 8 * (self.ranks + 1), 0)
            )
            os.pwrite(self._handle, struct.pack("q", max(noted)), 0)

    def may_start(self, rank: int, step: int) -> bool:
        """Note a step of a rank; False if the pass stops before it."""
        with self._locked():
            (limit,) = struct.unpack("q", os.pread(self._handle, 8, 0))
            if step <= limit:
                os.pwrite(self._handle, struct.pack("q", step), 8 * (rank + 1))
        return bool(step <= limit)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, which the system releases if the process dies."""
        fcntl.lockf(self._handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._handle, fcntl.LOCK_UN)


class Processes:
    """A pool of worker processes on this machine. Workers answer every message by an `Event`.

    `devices` are those of the slots, such as ``cpu`` or ``cuda:0``; `modules` are imported by every
    worker before the clock starts, which then shows `origin` milliseconds.
    """

    interrupted = False  # by `interrupt`

    def __init__(self, devices: Sequence[str], modules: Iterable[str], origin: int = 0) -> None:
        self.devices = devices
        self._context: Any = multiprocessing.get_context("forkserver")
        # what DistributedDataParallel imports when it is first made takes over a second
        ours = [module for module in modules if module.startswith("optsched.")]
        self._context.set_forkserver_preload(["torch._dynamo", "optsched.elastic.training", *ours])
        self._modules = sorted({*modules} - {"__main__"})
        self._origin, self._begun = origin, time.monotonic()
        self._stores = Path(tempfile.mkdtemp(prefix="optsched-elastic-"))
        self._joins = 0
        self._stops: dict[int, StopFile] = {}  # by the first slot of a job
        self._pipes: list[Any] = [None] * len(devices)
        self._workers: list[Any] = [None] * len(devices)
        self._alarm = self._context.Pipe(duplex=False)

    def start(self) -> None:
        """Start all workers."""
        resource_tracker.ensure_running()  # which ends with the signals unblocked
        # the server that imports for all workers ignores these signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for slot in range(len(self.devices)):
            self._start(slot)

    def close(self) -> None:
        """End all workers."""
        for worker in filter(None, self._workers):
            worker.kill()
            worker.join()
        for stop in self._stops.values():
            stop.close()
        shutil.rmtree(self._stores, ignore_errors=True)

    def begin(self) -> None:
        """Wait until all workers are ready, and start the clock."""
        waiting, deaths = set(range(len(self.devices))), 0
        while waiting and not self.interrupted:
            for event in self._received(None):
                waiting.discard(event.slot)
                if event.kind == "died":
                    waiting.add(event.slot)
                    deaths += 1
                    self.kill([event.slot])
            if deaths > MOST_CRASHES:
                raise OptschedError(
                    "the worker processes end before they begin; a script is to call run() in a "
                    'file, below if __name__ == "__main__":'
                )
        self._begun = time.monotonic()

    def interrupt(self) -> None:
        """Let `wait` return at once; safe in a signal handler."""
        self.interrupted = True
        self._alarm[1].send_bytes(b"!")

    def now(self) -> int:
        """Milliseconds since the start."""
        return self._origin + int((time.monotonic() - self._begun) * 1e3)

    def join(self, slots: Sequence[int], job: bytes, folder: str, done: int) -> None:
        """Make these slots the ranks of a job; each answers ``joined``."""
        self._joins += 1
        store = str(self._stores / str(self._joins))
        if slots[0] in self._stops:
            self._stops.pop(slots[0]).close()
        self._stops[slots[0]] = StopFile(f"{store}-stop", len(slots))
        for rank, slot in enumerate(slots):
            given = (len(slots), self.devices[slot], store, folder, done)
            self._send(slot, ("join", job, Join(rank, *given)))

    def order(self, slots: Sequence[int], order: Order) -> None:
        """Train a pass; every slot answers ``passed``, or ``stopped``."""
        self._stops[slots[0]].reset()
        for slot in slots:
            self._send(slot, ("order", order))

    def stop(self, slots: Sequence[int]) -> None:
        """Stop the pass of a job after its present step, or let it end."""
        self._stops[slots[0]].set_limit()

    def leave(self, slots: Iterable[int]) -> None:
        """Free these slots, between passes."""
        for slot in slots:
            self._send(slot, ("leave",))

    def kill(self, slots: Iterable[int]) -> None:
        """Free these slots at once by new processes."""
        for slot in slots:
            self._workers[slot].kill()
            self._workers[slot].join()
            self._pipes[slot].close()
            self._start(slot)

    def dead(self, slots: Iterable[int]) -> bool:
        """Whether one of these is dead, or dies within moments, which makes the others fail."""
        return bool(wait([self._workers[slot].sentinel for slot in slots], timeout=0.5))

    def wait(self, until: int | None) -> list[Event]:
        """Events as soon as there are any; none at this time, or when interrupted."""
        left = None if until is None else max(0.0, (until - self.now()) / 1e3)
        return [event for event in self._received(left) if event.kind != "ready"]

    def _received(self, left: float | None) -> list[Event]:
        at = {pipe: slot for slot, pipe in enumerate(self._pipes)}
        found = []
        pipes: list[Any] = wait([*at, self._alarm[0]], left)
        for pipe in pipes:
            if pipe is self._alarm[0]:
                pipe.recv_bytes()
                continue
            try:
                found.append(Event(at[pipe], *pipe.recv()))
            except (EOFError, OSError):
                found.append(Event(at[pipe], "died"))
        return found

    def _start(self, slot: int) -> None:
        self._pipes[slot], end = self._context.Pipe()
        worker = self._context.Process(target=_work, args=(end, self._modules), daemon=True)
        worker.start()
        self._workers[slot] = worker
        end.close()

    def _send(self, slot: int, message: tuple[Any, ...]) -> None:
        with suppress(OSError):  # `wait` reports its death
            self._pipes[slot].send(message)


def _work(pipe: Any, modules: list[str]) -> None:
    """Run in a worker: carry out messages until the scheduler ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the scheduler stops the passes
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    for module in modules:
        with suppress(Exception, SystemExit):  # an import that fails, fails again in its job
            importlib.import_module(module)
    member: Any = None
    stop: StopFile | None = None
    data: dict[bytes, Any] = {}
    with suppress(EOFError, OSError):
        pipe.send(("ready",))
        while True:
            kind, *given = pipe.recv()
            try:
                if kind == "join":
                    job, join = given
                    stop = StopFile(f"{join.store}-stop", join.workers)
                    member = _joined(job, join, data)
                    pipe.send(("joined", member.joined()))
                elif kind == "order":
                    found = member.train(*given, stop)
                    pipe.send(("stopped" if isinstance(found, float) else "passed", found))
                else:
                    with suppress(Exception):
                        member.leave()
                    if stop is not None:
                        stop.close()
                    member = stop = None
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"[:2000]))
                pipe.recv()  # until it is killed: that ends the waiting of other ranks
    os._exit(0)


def _joined(job: bytes, join: Join, data: dict[bytes, Any]) -> Any:
    """Make the member of a job; `data` keeps the data of the last one."""
    import torch

    from optsched.elastic.checkpoint import seed_all
    from optsched.elastic.training import Member

    spec = pickle.loads(job)
    if join.device.startswith("cuda"):
        torch.cuda.set_device(join.device)
    key = pickle.dumps(spec.data)
    if key not in data:
        data.clear()
        seed_all(0)  # the same data on all ranks, and after a crash
        data[key] = spec.data()
    return Member(spec, join, data[key])


def _follow() -> None:
    """Exit when the scheduler exits, also in the middle of a pass."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
