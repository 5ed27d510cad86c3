"""Server processes: a thread per instance runs segments; activations are in shared memory."""

from __future__ import annotations

import copy
import gc
import itertools
import json
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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.limits import available_cores
from optsched.problems.routing.plan import SLOTS

try:
    import torch
except ImportError:
    raise MissingExtra("running a network", "serving") from None

from optsched.serving.network import pad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from optsched.serving.network import Segment, SlimResNet

_CHILD: Final = "from optsched.serving.server_process import main; main()"
_MEMORY: Final = 2**30
"""Bytes of shared memory for activations."""

Task = tuple[Any, ...]
"""``("load", segment, width)``, ``("unload",)``, or ``("run", segment, width, parts)``.

The parts of a batch are rows of the shared memory by input width, the narrowest first.
"""


class ServerFailed(OptschedError):
    """A server did not start or died, or an instance could not do its task."""


class Servers:
    """Processes that run segments of a network; a context manager that ends them.

    Parameters
    ----------
    net
        Whose segments.
    devices
        Of every server: ``"cpu"`` (its share of the cores), ``"cpu:0,1"`` (these cores), or
        ``"cuda:0"``.
    side
        Pixels of an image's side.
    rows
        Images that the shared memory is to hold; beyond 1 GiB it holds 4096 at most.
    """

    def __init__(self, net: SlimResNet, devices: Sequence[str], side: int, rows: int) -> None:
        self.net, self.places = net, parse_devices(devices)
        self.sides = [side, side]  # of every segment's input; all but the first halve it
        for _ in net.channels[1:]:
            self.sides.append(-(-self.sides[-1] // 2))
        outputs = [c * s**2 for c, s in zip(net.channels, self.sides[1:], strict=True)]
        self.floats = max(net.in_channels * side**2, net.classes, *outputs)
        self.rows = max(1, min(rows, max(_MEMORY // (8 * self.floats), 4096)))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[list[Connection]] = []
        self._at: dict[Connection, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        whole = pickle.dumps(copy.deepcopy(self.net).cpu().requires_grad_(False))
        with _unnamed(len(whole)) as net, _unnamed(8 * self.rows * self.floats) as memory:
            net.write(whole)
            net.flush()
            self.memory = _buffers(memory.fileno(), self.rows)
            try:
                for device, cores in self.places:
                    self._start(
                        device=device, cores=cores, sides=self.sides, rows=self.rows,
                        memory=memory.fileno(), net=net.fileno(),
                    )  # fmt: skip
                for s, ends in enumerate(self._ends):
                    self._greet(s, ends)
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

    def _start(self, **setup: Any) -> None:
        pairs = [Pipe() for _ in range(SLOTS)]
        setup["pipes"] = [end.fileno() for _, end in pairs]
        self._ends.append([end for end, _ in pairs])
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(setup)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[setup["memory"], setup["net"], *setup["pipes"]],
                start_new_session=True,  # Ctrl-C is for the parent alone
            )
        )  # fmt: skip
        for _, end in pairs:
            end.close()

    def _greet(self, s: int, ends: list[Connection]) -> None:
        try:
            ends[0].recv_bytes()
        except (EOFError, OSError):
            raise ServerFailed(f"{self.name(s)} did not start") from None
        self._at |= {end: (s, i) for i, end in enumerate(ends)}

    @property
    def alive(self) -> set[int]:
        """Servers that have not died."""
        return {s for s, _ in self._at.values()}

    def name(self, s: int) -> str:
        """A server in messages."""
        return f"the process of server {s} ({self.places[s][0]})"

    def send(self, s: int, slot: int, task: Task) -> None:
        """Give an instance a task, which it answers; that a server is dead `receive` says."""
        with suppress(OSError):
            self._ends[s][slot].send_bytes(msgspec.msgpack.encode(task))

    def receive(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Servers and slots that have done their tasks; slot -1: the server has died.

        Raises
        ------
        ServerFailed
            A task could not be done, with the reason.
        """
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

    def run(self, lanes: Sequence[Sequence[tuple[int, int, Task]]]) -> list[list[float]]:
        """Do lanes of (server, slot, task) side by side; the ms of every task."""
        rest = [iter(lane) for lane in lanes]
        begun: dict[tuple[int, int], tuple[int, int]] = {}
        found: list[list[float]] = [[] for _ in lanes]
        free = list(range(len(lanes)))
        while free or begun:
            for lane in free:
                for s, slot, task in itertools.islice(rest[lane], 1):
                    begun[s, slot] = lane, time.perf_counter_ns()
                    self.send(s, slot, task)
            free = []
            for s, slot in self.receive() if begun else ():
                if slot < 0:
                    raise ServerFailed(f"{self.name(s)} died")
                lane, since = begun.pop((s, slot))
                found[lane].append((time.perf_counter_ns() - since) / 1e6)
                free.append(lane)
        return found


def parse_devices(devices: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Device and cores of every server; `InputError` for what is not there."""
    known = list(range(available_cores()))
    if hasattr(os, "sched_getaffinity"):
        known = sorted(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sharing = [i for i, one in enumerate(devices) if one == "cpu"]
    found: list[tuple[str, tuple[int, ...]]] = []
    for i, one in enumerate(devices):
        given = re.fullmatch(r"(cpu|cuda)(:\d+(,\d+)*)?", str(one))
        kind, rest = given.group(1, 2) if given else ("", "")
        numbers = tuple(map(int, rest[1:].split(","))) if rest else ()
        if kind == "cuda" and (numbers or (0,)) in [(j,) for j in range(gpus)]:
            found.append((f"cuda:{numbers[0] if numbers else 0}", ()))
        elif kind == "cpu" and {*numbers} <= {*known}:
            if not numbers:
                share = known[sharing.index(i) :: len(sharing)]
                numbers = tuple(share or [known[i % len(known)]])
            found.append(("cpu", numbers))
        else:
            raise InputError(
                f"devices[{i}]: expected cpu, cpu:0,1 (of cores {known}) or cuda:0 (of {gpus} "
                f"GPUs), got {one!r:.60}"
            )
    return found


def _unnamed(size: int) -> Any:
    """A file without a name: it goes with the last process that has it open."""
    memfd = getattr(os, "memfd_create", None)
    file: Any = os.fdopen(memfd(""), "w+b") if memfd else tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file


def _buffers(memory: int, rows: int) -> Tensor:
    """[buffer][row][float]; a segment reads one buffer and writes the other."""
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32).view(2, rows, -1)


# in the process


def main() -> None:
    """A server: its slots do tasks until the other side is gone."""
    setup = SimpleNamespace(**json.loads(sys.argv[1]))
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(1)
    net = pickle.loads(mmap.mmap(setup.net, 0, access=mmap.ACCESS_READ))
    pipes = [Connection(pipe) for pipe in setup.pipes]
    memory = _buffers(setup.memory, setup.rows)
    slots = [_Slot(net, setup, memory) for _ in pipes]
    gc.freeze()
    with suppress(OSError):
        pipes[0].send_bytes(b"")
    threads = [
        threading.Thread(target=slot.attend, args=[pipe], daemon=True)
        for slot, pipe in zip(slots, pipes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


class _Slot:
    """A place for an instance: does one task after the other."""

    def __init__(self, net: SlimResNet, setup: SimpleNamespace, memory: Tensor) -> None:
        self.net, self.sides, self.memory = net, setup.sides, memory
        self.device = torch.device(setup.device)
        self.segment: Segment | None = None

    def attend(self, pipe: Connection) -> None:
        """Do tasks until the other side is gone."""
        torch.set_num_threads(1)
        gpu = self.device.type == "cuda"
        stream: Any = torch.cuda.stream(torch.cuda.Stream(self.device)) if gpu else nullcontext()
        tasks: dict[str, Any] = {"load": self.load, "run": self.run, "unload": self.unload}
        with suppress(EOFError, OSError), torch.inference_mode(), stream:
            while True:
                (kind, *given), error = msgspec.msgpack.decode(pipe.recv_bytes()), ""
                try:
                    tasks[kind](*given)
                    if gpu:
                        torch.cuda.current_stream().synchronize()
                except Exception as fault:
                    error = f"{kind} {given}: {type(fault).__name__}: {fault}"
                pipe.send_bytes(error.encode())

    def load(self, k: int, width: int) -> None:
        """Copy the weights."""
        self.segment = segment = self.net.sliced(k, width).to(self.device)
        side = self.sides[k]
        for n in (1, 2):  # kernels and their memory are there before the first request comes
            x = torch.zeros(n, segment.inputs[-1], side, side, device=self.device)
            segment(x, width, len(segment.inputs) - 1)

    def unload(self) -> None:
        """Free them."""
        self.segment = None
        torch.cuda.empty_cache()  # nothing without a GPU

    def run(self, k: int, width: int, parts: list[tuple[int, list[int]]]) -> None:
        """Read one buffer and write the other."""
        segment, side = self.segment, self.sides[k]
        assert segment is not None
        inputs = []
        for i, rows in parts:
            c = segment.inputs[i]
            x = self.memory[k % 2, :, : c * side**2].index_select(0, torch.tensor(rows))
            inputs.append(x.view(-1, c, side, side).to(self.device))
        x = pad(inputs) if len(inputs) > 1 else inputs[0]
        found = segment(x, width, parts[-1][0]).flatten(1).cpu()
        at = torch.tensor([row for _, rows in parts for row in rows])
        self.memory[(k + 1) % 2, :, : found.shape[1]].index_copy_(0, at, found)
