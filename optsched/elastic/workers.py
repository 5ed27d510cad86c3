"""Persistent worker processes, one a slot: jobs come and go, importing torch is paid once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_CRASHES: Final = 10  # of a job's workers in a row, without a pass between
_TRAINING: Final = "optsched.elastic.training"
_MOMENT: Final = 0.5  # seconds in which the death of a process is seen after that of its sockets


class Join(NamedTuple):
    """What a worker is told to become a rank of a job."""

    rank: int
    workers: int
    device: str
    store: str  # file by which the ranks find each other
    folder: str  # of the job's checkpoint
    done: int  # passes that the scheduler knows of; the checkpoint may have one more


class Order(NamedTuple):
    """What the next pass is: its number from 0, and lists by rank."""

    number: int
    samples: list[int]
    batches: list[int]
    rate: float  # factor on the initial learning rates


class Event(NamedTuple):
    """What a worker says.

    ``"joined"`` (data size, learning rate, and the record of a pass that was saved but not told, or
    None), ``"passed"`` (its record), ``"failed"`` (why), or ``"died"``.
    """

    slot: int
    kind: str
    told: Any = None


class Processes:
    """A pool of worker processes on this machine. All that a worker is told it answers: `Event`.

    `devices` are those of the slots, such as ``cpu`` or ``cuda:0``; `modules` are imported by every
    worker before the clock starts, which then shows `origin` milliseconds.
    """

    def __init__(self, devices: Sequence[str], modules: Iterable[str], origin: int = 0) -> None:
        self.devices = devices
        self._forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if self._forks else "spawn")
        if self._forks:
            # what DistributedDataParallel imports when it is first made takes over a second
            own = [module for module in modules if module.startswith("optsched.")]
            self._context.set_forkserver_preload(["torch._dynamo", _TRAINING, *own])
        self._modules = sorted({*modules} - {"__main__"})
        self._origin, self._begun = origin, time.monotonic()
        self._stores = Path(tempfile.mkdtemp(prefix="optsched-elastic-"))
        self._count = 0
        self._pipes: list[Any] = [None] * len(devices)
        self._workers: list[Any] = [None] * len(devices)

    def start(self) -> None:
        """Start all workers."""
        if self._forks:  # what imports for all of them is not to hear of Ctrl-C
            resource_tracker.ensure_running()  # which ends with the signal unblocked
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for slot in range(len(self.devices)):
            self._start(slot)

    def close(self) -> None:
        """End all workers."""
        for worker in filter(None, self._workers):
            worker.kill()
            worker.join()
        shutil.rmtree(self._stores, ignore_errors=True)

    def begin(self) -> None:
        """Wait until all workers are there, and start the clock."""
        waiting, deaths = set(range(len(self.devices))), 0
        while waiting:
            for event in self._heard(None):
                waiting.discard(event.slot)
                if event.kind == "died":
                    waiting.add(event.slot)
                    deaths += 1
                    self.kill([event.slot])
            if deaths > MOST_CRASHES:
                raise OptschedError(
                    "the worker processes end before they begin; if a script calls run(), it is to "
                    'be a file, and to do so below if __name__ == "__main__":'
                )
        self._begun = time.monotonic()

    def now(self) -> int:
        """Milliseconds since the start."""
        return self._origin + int((time.monotonic() - self._begun) * 1e3)

    def join(self, slots: Sequence[int], job: bytes, folder: str, done: int) -> None:
        """Make these slots the ranks of a job; every one answers ``joined``."""
        self._count += 1
        store = str(self._stores / str(self._count))
        for rank, slot in enumerate(slots):
            given = (len(slots), self.devices[slot], store, folder, done)
            self._send(slot, ("join", job, Join(rank, *given)))

    def order(self, slots: Sequence[int], order: Order) -> None:
        """Train a pass; every slot answers ``passed``."""
        for slot in slots:
            self._send(slot, ("order", order))

    def leave(self, slots: Iterable[int]) -> None:
        """Free these slots, between passes."""
        for slot in slots:
            self._send(slot, ("leave",))

    def kill(self, slots: Iterable[int]) -> None:
        """Free these slots at once, whatever they do: they are new processes then."""
        for slot in slots:
            self._workers[slot].kill()
            self._workers[slot].join()
            self._pipes[slot].close()
            self._start(slot)

    def dead(self, slots: Iterable[int]) -> bool:
        """Whether one of these is dead, or dies within moments: then its peers fail by that."""
        return bool(wait([self._workers[slot].sentinel for slot in slots], _MOMENT))

    def wait(self, until: int | None) -> list[Event]:
        """What has happened, at the latest at this time; nothing if it came first."""
        left = None if until is None else max(0.0, (until - self.now()) / 1e3)
        return [event for event in self._heard(left) if event.kind != "ready"]

    def _heard(self, left: float | None) -> list[Event]:
        at = {pipe: slot for slot, pipe in enumerate(self._pipes)}
        found = []
        pipes: list[Any] = wait(list(at), left)
        for pipe in pipes:
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
        with suppress(OSError):  # that it is dead `wait` says
            self._pipes[slot].send(message)


def _work(pipe: Any, modules: list[str]) -> None:
    """Run in a worker: do what is told until the scheduler is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    for module in modules:
        with suppress(Exception, SystemExit):  # what cannot be imported fails the job that needs it
            importlib.import_module(module)
    member: Any = None
    data: dict[bytes, Any] = {}
    with suppress(EOFError, OSError):
        pipe.send(("ready",))
        while True:
            kind, *given = pipe.recv()
            try:
                if kind == "join":
                    job, join = given
                    member, told = _joined(job, join, data)
                    pipe.send(("joined", told))
                elif kind == "order":
                    pipe.send(("passed", member.train(*given)))
                else:
                    with suppress(Exception):
                        member.leave()
                    member = None
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"[:2000]))
                pipe.recv()  # until it is killed: peers that wait for it hear of it by that
    os._exit(0)


def _joined(job: bytes, join: Join, data: dict[bytes, Any]) -> tuple[Any, Any]:
    import torch

    from optsched.elastic.training import Member, seed_all

    spec = pickle.loads(job)
    if join.device.startswith("cuda"):
        torch.cuda.set_device(join.device)
    key = pickle.dumps(spec.data)
    if key not in data:
        data.clear()  # the data of one job at a time
        seed_all(0)  # the same data on all ranks, and after a crash
        data[key] = spec.data()
    member = Member(spec, join, data[key])
    return member, (len(member.train_data), member.rate, member.untold)


def _follow() -> None:
    """End with the scheduler, also in the middle of a pass: nothing is written for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
