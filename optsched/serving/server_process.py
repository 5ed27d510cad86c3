"""Server processes: a thread per instance runs segments; activations are in shared memory."""

from __future__ import annotations

import copy
import gc
import math
import mmap
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.serving.plan import SLOTS
from optsched.solving.limits import available_cores

try:
    import torch
except ImportError:
    raise MissingExtra("running a network", "serving") from None

from optsched.serving.network import pad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from optsched.serving.network import SlimResNet

_MEMORY: Final = 2**30  # bytes of shared memory for activations

Task = tuple[Any, ...]
"""``("load", segment, width)``, ``("unload",)``, or ``("run", segment, width, parts)``.

The parts of a batch are rows of the shared memory by input width, the narrowest first.
"""


class ServerFailed(OptschedError):
    """A server did not start or died, or an instance could not do its task."""


class Servers:
    """Processes that run segments of a network; a context manager that ends them.

    A device is ``"cpu"`` (a share of the cores), ``"cpu:0,1"`` (these cores), or ``"cuda:0"``. The
    shared memory holds so many rows of images; beyond 1 GiB it holds 4096 at most.
    """

    def __init__(self, net: SlimResNet, devices: Sequence[str], side: int, rows: int) -> None:
        self.net, self.places = net, parse_devices(devices)
        # of every segment's input, and of the output: all segments but the first halve it
        self.sides = [-(-side // 2 ** max(k - 1, 0)) for k in range(len(net.channels) + 1)]
        outputs = [c * s**2 for c, s in zip(net.channels, self.sides[1:], strict=True)]
        self.floats = max(net.in_channels * side**2, net.classes, *outputs)
        self.rows = max(1, min(rows, max(_MEMORY // (8 * self.floats), 4096)))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[list[Connection]] = []
        self._at: dict[Connection, tuple[int, int]] = {}  # server and slot

    def __enter__(self) -> Self:
        net = copy.deepcopy(self.net).cpu()
        with _unnamed() as memory:
            memory.truncate(8 * self.rows * self.floats)
            self.memory = _buffers(memory.fileno(), self.rows)
            try:
                for _ in self.places:
                    self._start(memory.fileno())
                for s, place in enumerate(self.places):
                    end = self._ends[s][0]
                    try:
                        end.send_bytes(pickle.dumps((net, *place, self.sides, self.rows)))
                        end.recv_bytes()
                    except (EOFError, OSError):
                        raise ServerFailed(f"{self.name(s)} did not start") from None
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for end in [end for ends in self._ends for end in ends]:
            end.close()
        for process in self._processes:
            try:
                process.wait(5)
            except BaseException:  # too late, or Ctrl-C
                process.kill()
                process.wait()

    def _start(self, memory: int) -> None:
        pairs = [Pipe() for _ in range(SLOTS)]
        files = [memory, *(end.fileno() for _, end in pairs)]
        self._ends.append([end for end, _ in pairs])
        self._at |= {end: (len(self._processes), i) for i, (end, _) in enumerate(pairs)}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=files,
            start_new_session=True,  # Ctrl-C is for the parent alone
        )
        self._processes.append(process)
        for _, end in pairs:
            end.close()

    @property
    def alive(self) -> bool:
        """Whether any server has not died."""
        return bool(self._at)

    def name(self, s: int) -> str:
        """A server in messages."""
        return f"the process of server {s} ({self.places[s][0]})"

    def send(self, s: int, slot: int, task: Task) -> None:
        """Give an instance a task, which it answers; that a server is dead `receive` says."""
        with suppress(OSError):
            self._ends[s][slot].send_bytes(msgspec.msgpack.encode(task))

    def receive(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Servers and slots that have done their tasks; slot -1: the server has died."""
        found = []
        for end in select.select(list(self._at), (), (), timeout)[0]:
            if end not in self._at:
                continue  # of a server that was found dead just now
            s, slot = self._at[end]
            try:
                error = end.recv_bytes()
            except (EOFError, OSError):
                self._at = {end: at for end, at in self._at.items() if at[0] != s}
                self._processes[s].kill()
                self._processes[s].wait()  # it writes no more
                slot, error = -1, b""
            if error:
                raise ServerFailed(f"{self.name(s)}: {error.decode()}")
            found.append((s, slot))
        return found

    def run(self, tasks: Sequence[tuple[int, int, Task]]) -> list[float]:
        """Do tasks, (server, slot, task), side by side on different slots; the ms of each."""
        begun: dict[tuple[int, int], float] = {}
        ended: dict[tuple[int, int], float] = {}
        for s, slot, task in tasks:
            begun[s, slot] = time.perf_counter()
            self.send(s, slot, task)
        while len(ended) < len(begun):
            for s, slot in self.receive():
                if slot < 0:
                    raise ServerFailed(f"{self.name(s)} died")
                ended[s, slot] = time.perf_counter()
        return [1e3 * (ended[at] - since) for at, since in begun.items()]


def parse_devices(devices: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Device and cores of every server; `InputError` for what is not there."""
    cores_of = getattr(os, "sched_getaffinity", lambda _: range(available_cores()))
    known, gpus = sorted(cores_of(0)), torch.cuda.device_count()
    sharing = [i for i, one in enumerate(devices) if one == "cpu"]
    found = []
    for i, one in enumerate(devices):
        given = re.fullmatch(r"cpu(?::(\d+(?:,\d+)*))?|cuda:(\d+)", str(one))
        cores = [int(core) for core in given[1].split(",")] if given and given[1] else []
        if given and given[2] and int(given[2]) < gpus:
            found.append((one, cores))
        elif given and not given[2] and {*cores} <= {*known}:
            share = cores or known[sharing.index(i) :: len(sharing)]
            found.append(("cpu", share or [known[i % len(known)]]))
        else:
            raise InputError(
                f"devices[{i}]: expected cpu, cpu:0,1 (of cores {known}) or cuda:0 (of {gpus} "
                f"GPUs), got {one!r:.60}"
            )
    return found


def _unnamed() -> Any:
    """A file without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(""), "w+b")
    return tempfile.TemporaryFile()


def _buffers(memory: int, rows: int) -> Tensor:
    """[buffer][row][float]; a segment reads one buffer and writes the other."""
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32).view(2, rows, -1)


def main() -> None:
    """Run in the process of a server: its slots do tasks until the other side is gone."""
    memory, *files = map(int, sys.argv[1:])
    pipes = [Connection(file) for file in files]
    try:
        net, device, cores, sides, rows = pickle.loads(pipes[0].recv_bytes())
    except (EOFError, OSError):  # nobody is there any more
        os._exit(1)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    given = (net, torch.device(device), sides, _buffers(memory, rows))
    threads = [threading.Thread(target=_attend, args=(pipe, *given)) for pipe in pipes]
    gc.freeze()
    pipes[0].send_bytes(b"")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _attend(
    pipe: Connection, net: SlimResNet, device: torch.device, sides: list[int], memory: Tensor
) -> None:
    """A place for an instance: do one task after the other."""
    torch.set_num_threads(1)
    gpu = device.type == "cuda"
    stream: Any = torch.cuda.stream(torch.cuda.Stream(device)) if gpu else nullcontext()
    segment: Any = None

    def load(k: int, width: int) -> Any:
        copied = net.sliced(k, width).to(device)
        for n in (1, 2):  # kernels and their memory are there before the first request comes
            x = torch.zeros(n, copied.inputs[-1], sides[k], sides[k], device=device)
            copied(x, width, len(copied.inputs) - 1)
        return copied

    def run(k: int, width: int, parts: list[tuple[int, list[int]]]) -> None:
        inputs = []
        for i, rows in parts:
            shape = (segment.inputs[i], sides[k], sides[k])
            x = memory[k % 2, :, : math.prod(shape)].index_select(0, torch.tensor(rows))
            inputs.append(x.view(-1, *shape).to(device))
        x = pad(inputs) if len(inputs) > 1 else inputs[0]
        found = segment(x, width, parts[-1][0]).flatten(1).cpu()
        at = torch.tensor([row for _, rows in parts for row in rows])
        memory[(k + 1) % 2, :, : found.shape[1]].index_copy_(0, at, found)

    with suppress(EOFError, OSError), torch.inference_mode(), stream:
        while True:
            (kind, *given), error = msgspec.msgpack.decode(pipe.recv_bytes()), ""
            try:
                if kind == "run":
                    run(*given)
                else:  # what was there goes
                    segment = load(*given) if kind == "load" else None
                    torch.cuda.empty_cache()  # nothing without a GPU
                if gpu:
                    torch.cuda.current_stream().synchronize()
            except Exception as fault:
                error = f"{kind} {given}: {type(fault).__name__}: {fault}"
            pipe.send_bytes(error.encode())
