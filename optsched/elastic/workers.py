"""Persistent worker processes, one a slot, which import torch once and train many jobs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.elastic.door import Door, hung_up, interface_of
from optsched.errors import OptschedError
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.elastic.door import OpenPool

MOST_CRASHES: Final = 10  # of a job's workers in a row, without a pass between
RUN_ENDED: Final = 3  # exit code of a worker of another host whose pool has ended its run


class Join(NamedTuple):
    """What a worker needs to become a rank of a job."""

    rank: int
    workers: int
    device: str
    store: str  # prefix of the keys by which the ranks find each other
    folder: str  # of the job's checkpoint
    done: int  # passes in the scheduler's log; the checkpoint may have one more


class Setting(NamedTuple):
    """What all workers get: modules to import, the address of the store, and their network."""

    modules: list[str]
    store: tuple[str, int] = ("", 0)
    interface: str = ""  # "": as torch chooses


class Order(NamedTuple):
    """The next pass: its number from 0, and lists by rank."""

    number: int
    samples: list[int]
    batches: list[int]
    rate: float  # factor of the learning rates


class Event(NamedTuple):
    """Message of a worker: joined, passed (record), stopped (part done), failed (why), or died."""

    slot: int
    kind: str
    content: Any = None


class StopSign:
    """Agree on the last step of all ranks of a job, by a value in a store.

    The value is the largest step that a rank has started; with a "!" no later one may start: a rank
    that stopped earlier would leave the others in an all-reduce. Every change compares and sets.
    """

    def __init__(self, store: Any, join: str) -> None:
        self._store, self._key = store, f"{join}/stop"

    def reset(self) -> None:
        """Begin a pass: no step is noted, and there is no limit."""
        self._store.set(self._key, "-1")

    def set_limit(self) -> None:
        """Stop all ranks after the largest step that one of them has started."""
        value = self._store.get(self._key).decode()
        while not value.endswith("!"):
            value = self._store.compare_set(self._key, value, f"{value}!").decode()

    def may_start(self, step: int) -> bool:
        """Note a step of this rank; False if the pass stops before it."""
        value = self._store.compare_set(self._key, f"{step - 1}", f"{step}").decode()
        while not value.endswith("!") and int(value) < step:
            value = self._store.compare_set(self._key, value, f"{step}").decode()
        return step <= int(value.rstrip("!"))


class Processes:
    """A pool of worker processes on this machine. Workers answer every message by an `Event`.

    `devices` are those of the slots, such as ``cpu`` or ``cuda:0``, and "" of slots for workers of
    other hosts, which join by `opened`; `modules` are imported by every worker before the clock
    starts, which then shows `origin` milliseconds.
    """

    interrupted = False  # by `interrupt`
    vacant: set[int]
    """Slots whose workers have not joined, or died and are not replaced yet."""

    def __init__(
        self, devices: Sequence[str], modules: Iterable[str], origin: int = 0,
        opened: OpenPool | None = None, folder: str = "",
    ) -> None:  # fmt: skip
        self.devices = list(devices)
        self.vacant = {k for k, device in enumerate(devices) if not device}
        self._origin, self._begun = origin, time.monotonic()
        self._joins = 0
        self._stops: dict[int, StopSign] = {}  # by the first slot of a job
        self._pipes: list[Any] = [None] * len(devices)
        self._workers: list[Any] = [None] * len(devices)  # None: of another host
        self._alarm = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        self._door = None if opened is None else Door(opened, folder, self._ring)
        self._setting = Setting(sorted({*modules} - {"__main__"}))

    def start(self) -> None:
        """Start all workers of this host."""
        forkserver_context(self._setting.modules)
        import torch.distributed as dist  # while the server imports it

        host = "127.0.0.1" if self._door is None else self._door.host
        given = socket.create_server((host, 0))
        place = host, given.getsockname()[1]
        fixed: Any = {"wait_for_workers": False, "master_listen_fd": given.detach()}
        self._store = dist.TCPStore(*place, is_master=True, **fixed)  # type: ignore[attr-defined]
        interface = "" if self._door is None else interface_of(host)
        self._setting = Setting(self._setting.modules, place, interface)
        for slot in {*range(len(self.devices))} - self.vacant:
            self._start(slot)

    def close(self) -> None:
        """End all workers."""
        if self._door is not None:
            self._door.close()
        for worker, pipe in zip(self._workers, self._pipes, strict=True):
            if worker is not None:
                worker.kill()
                worker.join()
            elif pipe is not None:
                with suppress(OSError):
                    pipe.send(("end",))
                pipe.close()

    def begin(self) -> None:
        """Wait until all workers are ready, and start the clock."""
        waiting, deaths = set(range(len(self.devices))), 0
        while waiting and not self.interrupted:
            for event in self._received(None):
                if event.kind == "ready":
                    waiting.discard(event.slot)
                if event.kind == "died":
                    waiting.add(event.slot)
                    deaths += self._workers[event.slot] is not None
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
        self._ring()

    def _ring(self) -> None:
        self._alarm[1].send_bytes(b"!")

    def now(self) -> int:
        """Milliseconds since the start."""
        return self._origin + int((time.monotonic() - self._begun) * 1e3)

    def join(self, slots: Sequence[int], job: bytes, folder: str, done: int) -> None:
        """Make these slots the ranks of a job; each answers ``joined``."""
        self._joins += 1
        store = str(self._joins)
        self._stops[slots[0]] = StopSign(self._store, store)
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
        """Free these slots at once by new processes; those of other hosts have to join anew."""
        for slot in slots:
            if self._workers[slot] is None:
                self._pipes[slot].close()
                self.vacant.add(slot)
                continue
            self._workers[slot].kill()
            self._workers[slot].join()
            self._pipes[slot].close()
            self._start(slot)

    def dead(self, slots: Iterable[int]) -> bool:
        """Whether one of these is dead, or dies within moments, which makes the others fail."""
        workers = {slot: self._workers[slot] for slot in slots}
        if wait([worker.sentinel for worker in workers.values() if worker], timeout=0.5):
            return True
        return any(hung_up(self._pipes[slot], 0.2) for slot, w in workers.items() if w is None)

    def wait(self, until: int | None) -> list[Event]:
        """Events as soon as there are any; none at this time, or when interrupted."""
        left = None if until is None else max(0.0, (until - self.now()) / 1e3)
        return [event for event in self._received(left) if event.kind != "ready"]

    def _received(self, left: float | None) -> list[Event]:
        at = {pipe: slot for slot, pipe in enumerate(self._pipes) if slot not in self.vacant}
        found = []
        pipes: list[Any] = wait([*at, self._alarm[0]], left)
        for pipe in pipes:
            if pipe is self._alarm[0]:
                pipe.recv_bytes()
                found += self._admitted()
                continue
            try:
                found.append(Event(at[pipe], *pipe.recv()))
            except (EOFError, OSError):
                found.append(Event(at[pipe], "died"))
        return found

    def _admitted(self) -> list[Event]:
        """Give slots to workers of other hosts that have arrived, or refuse them."""
        found: list[Event] = []
        while self._door is not None and not self._door.arrived.empty():
            pipe, given = self._door.arrived.get()
            why = self._refusal(given)
            with suppress(OSError):
                there = {"folder": self._door.folder, **self._setting._asdict()}
                pipe.send({"refused": why} if why else there)
            if why:
                pipe.close()
                continue
            slot = min(self.vacant)
            self.vacant.discard(slot)
            self._pipes[slot], self.devices[slot] = pipe, given["device"]
            found.append(Event(slot, "came"))
        return found

    def _refusal(self, given: dict[str, Any]) -> str:
        """Why a worker cannot join; "" if it can."""
        device = str(given.get("device"))
        for name, ours in hello(device).items():
            if given.get(name) != ours:
                return f"it has {name} {ours}, this host {given.get(name)}; install the same"
        kinds = {device.partition(":")[0] for device in self.devices if device}
        if kinds - {device.partition(":")[0]}:
            return f"its workers have devices of kind {', '.join(kinds)}; see --devices"
        return "" if self.vacant else "all of its slots have workers; see --remote"

    def _start(self, slot: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        self._pipes[slot], end = context.Pipe()
        worker = context.Process(target=work, args=(end, self._setting), daemon=True)
        worker.start()
        self._workers[slot] = worker
        end.close()

    def _send(self, slot: int, message: tuple[Any, ...]) -> None:
        with suppress(OSError):  # `wait` reports its death
            self._pipes[slot].send(message)


def hello(device: str) -> dict[str, str]:
    """Return what pools check: they take workers of the same versions and kind of device."""
    return {"optsched": __version__, "torch": version("torch"), "device": device}


def forkserver_context(modules: Iterable[str]) -> Any:
    """Start the server that imports for all workers; it ignores SIGINT and SIGTERM."""
    context: Any = multiprocessing.get_context("forkserver")
    # what DistributedDataParallel imports when it is first made takes over a second
    ours = [module for module in modules if module.startswith("optsched.")]
    context.set_forkserver_preload(["torch._dynamo", "optsched.elastic.training", *ours])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about hosts without a name
    resource_tracker.ensure_running()  # which ends with the signals unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def work(pipe: Any, setting: Setting) -> None:
    """Run in a worker: carry out messages until the scheduler ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the scheduler stops the passes
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    import torch

    if name := setting.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    for module in setting.modules:
        with suppress(Exception, SystemExit):  # an import that fails, fails again in its job
            importlib.import_module(module)
    member: Any = None
    fixed: Any = {"is_master": False, "wait_for_workers": False}
    store = torch.distributed.TCPStore(*setting.store, **fixed)  # type: ignore[attr-defined]
    stop: StopSign | None = None
    data: dict[bytes, Any] = {}
    with suppress(EOFError, OSError):
        pipe.send(("ready",))
        while True:
            kind, *given = pipe.recv()
            if kind == "end":
                os._exit(RUN_ENDED)
            try:
                if kind == "join":
                    job, join = given
                    stop = StopSign(store, join.store)
                    member = _joined(job, join, store, data)
                    pipe.send(("joined", member.joined()))
                elif kind == "order":
                    found = member.train(*given, stop)
                    pipe.send(("stopped" if isinstance(found, float) else "passed", found))
                else:
                    with suppress(Exception):
                        member.leave()
                    member = stop = None
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"[:2000]))
                pipe.recv()  # until it is killed: that ends the waiting of other ranks
    os._exit(0)


def _joined(job: bytes, join: Join, store: Any, data: dict[bytes, Any]) -> Any:
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
    return Member(spec, join, data[key], store)


def _follow() -> None:
    """Exit when the scheduler exits, also in the middle of a pass."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
