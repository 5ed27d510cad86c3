"""Server processes: one thread per instance runs segments; activations are in shared memory."""

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
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.serving.tables import SLOTS
from optsched.solving.limits import available_cores

try:
    import torch
except ImportError:
    raise MissingExtra("running a network", "serving") from None

from optsched.serving.network import pad, shapes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from optsched.serving.network import Segmented, Shapes

_MEMORY: Final = 2**30  # bytes of shared memory for activations

Task = tuple[Any, ...]
"""``("load", segment, width)``, ``("unload",)``, or ``("run", segment, width, parts)``.

The parts of a batch are rows of the shared memory by input width, ascending.
"""


_importing = False  # whether this is a server that imports the main script


class ServerFailed(OptschedError):
    """A server did not start, or died, perhaps by an error in a task."""


class Servers:
    """Processes that run segments of a network; a context manager.

    A device is ``"cpu"`` (a share of the cores), ``"cpu:0,1"`` (these cores), or ``"cuda:0"``;
    `shape` is that of an image. The shared memory has a row per image in progress, at most `rows`,
    and 4096 beyond 1 GiB.
    """

    def __init__(
        self, net: Segmented, devices: Sequence[str], shape: Sequence[int], rows: int
    ) -> None:
        self.net, self.places = net, parse_devices(devices)
        self.shapes = shapes_of(net, shape)
        self.floats = max(math.prod(one) for row in self.shapes for one in row)
        self.rows = max(1, min(rows, max(_MEMORY // (8 * self.floats), 4096)))
        self.errors: dict[int, str] = {}
        """Errors of tasks by server; they have ended it."""
        self.failed: dict[int, str] = {}
        """Errors of the network by row of the shared memory."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[list[Connection]] = []
        self._at: dict[int, tuple[int, int]] = {}  # server and slot by file, of those alive
        self._bell, self._button = os.pipe()
        self._rung = False

    def __enter__(self) -> Self:
        if _importing:
            raise ServerFailed(
                "the main script starts servers when it is imported, and servers import it for its "
                'classes: put what it does under `if __name__ == "__main__":`'
            )
        net = copy.deepcopy(self.net).cpu()
        with _unnamed() as memory:
            memory.truncate(8 * self.rows * self.floats)
            self.memory = _buffers(memory.fileno(), self.rows)
            try:
                for _ in self.places:
                    self._start(memory.fileno())
                for s, place in enumerate(self.places):
                    end = self._ends[s][0]
                    given = (net, *place, self.shapes, self.rows)
                    with suppress(BrokenPipeError):  # then it has sent an error
                        end.send_bytes(pickle.dumps(_main_module(net)))
                        end.send_bytes(pickle.dumps(given))
                    try:
                        error = end.recv_bytes().decode()
                    except (EOFError, OSError):
                        error = "it ended"
                    if error:
                        raise ServerFailed(f"{self.name(s)} did not start: {error}")
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for end in [end for ends in self._ends for end in ends]:
            end.close()
        for file in (self._bell, self._button):
            os.close(file)
        for process in self._processes:
            try:
                process.wait(5)
            except BaseException:  # timeout, or Ctrl-C
                process.kill()
                process.wait()

    def _start(self, memory: int) -> None:
        pairs = [Pipe() for _ in range(SLOTS)]
        files = [memory, *(end.fileno() for _, end in pairs)]
        self._ends.append([end for end, _ in pairs])
        self._at |= {end.fileno(): (len(self._processes), i) for i, (end, _) in enumerate(pairs)}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8192"}
            | os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=files,
            start_new_session=True,  # Ctrl-C is handled by the parent
        )
        self._processes.append(process)
        for _, end in pairs:
            end.close()

    @property
    def alive(self) -> set[int]:
        """Servers that are alive."""
        return {s for s, _ in self._at.values()}

    def name(self, s: int) -> str:
        """Name in messages."""
        return f"the process of server {s} ({self.places[s][0]})"

    def send(self, s: int, slot: int, task: Task) -> None:
        """Send a task to an instance; failures are reported by `receive`."""
        with suppress(OSError):
            self._ends[s][slot].send_bytes(msgspec.msgpack.encode(task))

    def wake(self) -> None:
        """End a `receive` of another thread, or its next one."""
        if not self._rung:
            self._rung = True
            os.write(self._button, b"!")

    def receive(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Wait for tasks to end; returns servers and slots, slot -1 for a server that has died."""
        found = []
        for file in select.select([*self._at, self._bell], (), (), timeout)[0]:
            if file == self._bell:
                os.read(self._bell, 16)
                self._rung = False
            if file not in self._at:
                continue  # its server died in this call
            s, slot = self._at[file]
            try:
                if reply := self._ends[s][slot].recv_bytes():
                    error, failed = msgspec.msgpack.decode(reply)
                    self.failed = failed | self.failed
                    if error:
                        self.errors[s] = error
            except (EOFError, OSError):
                slot = -1
            if slot < 0 or s in self.errors:
                self._at = {file: at for file, at in self._at.items() if at[0] != s}
                self._processes[s].kill()
                self._processes[s].wait()  # no more writes to the shared memory
                slot = -1
            found.append((s, slot))
        return found

    def run(self, tasks: Sequence[tuple[int, int, Task]]) -> list[float]:
        """Run tasks (server, slot, task) on different slots; returns the ms of each."""
        begun: dict[tuple[int, int], float] = {}
        ended: dict[tuple[int, int], float] = {}
        for s, slot, task in tasks:
            begun[s, slot] = time.perf_counter()
            self.send(s, slot, task)
        while len(ended) < len(begun):
            for s, slot in self.receive():
                if slot < 0:
                    raise ServerFailed(f"{self.name(s)} died: {self.errors.get(s, 'it ended')}")
                if self.failed:
                    raise ServerFailed(f"{self.name(s)}: {next(iter(self.failed.values()))}")
                ended[s, slot] = time.perf_counter()
        return [1e3 * (ended[at] - since) for at, since in begun.items()]


def parse_devices(devices: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return device and cores of every server; refuses unknown devices."""
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


def _main_module(net: Segmented) -> dict[str, Any] | None:
    """What a server needs to import the program that defines the network, if it does."""
    used = {type(part).__module__ for part in net.modules()}
    if "__main__" not in used:
        return None
    found = spawn.get_preparation_data("server")
    return {key: value for key, value in found.items() if key != "authkey"}


def _unnamed() -> Any:
    """Open an unnamed file, which is removed with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(""), "w+b")
    return tempfile.TemporaryFile()


def _buffers(memory: int, rows: int) -> Tensor:
    """Map the memory as [buffer][row][float]; a segment reads one buffer, writes the other."""
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32).view(2, rows, -1)


def main() -> None:
    """Entry point of a server process: runs tasks until the pipes are closed."""
    memory, *files = map(int, sys.argv[1:])
    pipes = [Connection(file) for file in files]
    try:
        global _importing
        if (module := pickle.loads(pipes[0].recv_bytes())) is not None:
            _importing = True
            spawn.prepare(module)
        net, device, cores, shapes, rows = pickle.loads(pipes[0].recv_bytes())
    except (EOFError, OSError):  # the parent has ended
        os._exit(1)
    except Exception as error:  # code of the user
        pipes[0].send_bytes(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    given = (net, torch.device(device), shapes, _buffers(memory, rows))
    threads = [threading.Thread(target=_attend, args=(pipe, *given)) for pipe in pipes]
    gc.freeze()
    pipes[0].send_bytes(b"")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _rounded(x: Tensor) -> Tensor:
    """Repeat an image up to a size of three binary digits: new shapes are slow at first."""
    step = 2 ** max(0, len(x).bit_length() - 3)
    more = -len(x) % step
    return torch.cat([x, x[:1].expand(more, *x.shape[1:])]) if more else x


def _attend(
    pipe: Connection, net: Segmented, device: torch.device, shapes: Shapes, memory: Tensor
) -> None:
    """Run the tasks of one slot."""
    torch.set_num_threads(1)
    gpu = device.type == "cuda"
    stream: Any = torch.cuda.stream(torch.cuda.Stream(device)) if gpu else nullcontext()
    padded = getattr(net, "zero_padded", False)
    segment: Any = None

    def load(k: int, width: int) -> Any:
        slice_of = getattr(net, "sliced", lambda k, _: copy.deepcopy(net.segments[k]))
        copied = slice_of(k, width).to(device)
        for n in (1, 2):  # allocates kernels and memory before the first request
            x = torch.zeros(n, *shapes[k][-1], device=device)
            copied(x, width, len(shapes[k]) - 1)
        return copied

    def batch(k: int, width: int, parts: list[tuple[int, list[int]]]) -> None:
        inputs = []
        for i, rows in parts:
            shape = shapes[k][i]
            x = memory[k % 2, :, : math.prod(shape)].index_select(0, torch.tensor(rows))
            inputs.append((i, x.view(-1, *shape).to(device)))
        if padded and len(inputs) > 1:
            inputs = [(inputs[-1][0], pad([x for _, x in inputs]))]
        outputs = [segment(_rounded(x), width, i)[: len(x)] for i, x in inputs]
        found = torch.cat([x.flatten(1) for x in outputs]).cpu()
        at = torch.tensor([row for _, rows in parts for row in rows])
        memory[(k + 1) % 2, :, : found.shape[1]].index_copy_(0, at, found)

    def run(k: int, width: int, parts: list[tuple[int, list[int]]]) -> dict[int, str]:
        """Run a batch, or if it fails, each of its images; returns errors by row."""
        try:
            batch(k, width, parts)
        except Exception as fault:  # code of the user
            if gpu:
                torch.cuda.current_stream().synchronize()  # raises if the device cannot go on
            if len(alone := [(i, [row]) for i, rows in parts for row in rows]) == 1:
                return {alone[0][1][0]: f"{type(fault).__name__}: {fault}"}
            return {row: text for one in alone for row, text in run(k, width, [one]).items()}
        return {}

    with suppress(EOFError, OSError), torch.inference_mode(), stream:
        while True:
            (kind, *given), error, failed = msgspec.msgpack.decode(pipe.recv_bytes()), "", {}
            try:
                if kind == "run":
                    failed = run(*given)
                else:
                    segment = load(*given) if kind == "load" else None
                    torch.cuda.empty_cache()
                if gpu:
                    torch.cuda.current_stream().synchronize()
            except Exception as fault:
                error = f"{kind} {given}: {type(fault).__name__}: {fault}"
            pipe.send_bytes(msgspec.msgpack.encode((error, failed)) if error or failed else b"")
