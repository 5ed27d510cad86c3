"""Server processes: a thread per instance runs segments; activations are in shared memory."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.limits import available_cores

try:
    import torch
except ImportError:
    raise MissingExtra("running a network", "serving") from None

from optsched.problems.routing.plan import SLOTS
from optsched.serving.network import SlimResNet, pad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from optsched.serving.network import Segment

_CHILD: Final = "from optsched.serving.server_process import main; main()"
_PATIENCE: Final = 5.0
"""Seconds that a process has to end by itself."""


class Load(msgspec.Struct, tag=0, array_like=True):
    """Make the slot an instance."""

    segment: int
    width: int


class Execute(msgspec.Struct, tag=1, array_like=True):
    """Run a batch: rows of the shared memory by input width, the narrowest first."""

    width: int
    parts: list[tuple[int, list[int]]]


class Unload(msgspec.Struct, tag=2, array_like=True):
    """Free the instance."""


Order = Load | Execute | Unload


class _Setup(msgspec.Struct):
    """What a process is told when it starts; numbers of files that it inherits."""

    device: str
    cores: tuple[int, ...]
    sides: list[int]
    rows: int
    memory: int
    weights: int
    pipes: list[int]


class Answer(NamedTuple):
    """An instance has carried out its order; `slot` is -1 when the server has died."""

    server: int
    slot: int


class ServerFailed(OptschedError):
    """An instance could not carry out its order, or a server did not start."""


# the side of those who give orders


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
        Images that the shared memory holds.
    """

    def __init__(self, net: SlimResNet, devices: Sequence[str], side: int, rows: int) -> None:
        self.places = parse_devices(devices)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sides = [side]
        for _ in net.channels:
            self.sides.append(self.sides[-1] if len(self.sides) == 1 else -(-self.sides[-1] // 2))
        self.rows, self._net = rows, net
        self._floats = row_floats(net, side)
        self._pipes: dict[Connection, tuple[int, int]] = {}
        self._ends: list[list[Connection]] = []
        self._encode = msgspec.msgpack.Encoder().encode

    def __enter__(self) -> Self:
        whole = pickle.dumps(copy.deepcopy(self._net).cpu().requires_grad_(False))
        with _anonymous(len(whole)) as weights, _anonymous(8 * self.rows * self._floats) as memory:
            weights.write(whole)
            weights.flush()
            self.memory = _rows(memory.fileno(), self.rows)
            try:
                for device, cores in self.places:
                    self._start(device, cores, memory.fileno(), weights.fileno())
                for s in range(len(self.places)):
                    self._greet(s)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for row in self._ends:
            for end in row:
                end.close()
        for process in self.processes:
            try:
                process.wait(_PATIENCE)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()

    def _start(self, device: str, cores: tuple[int, ...], memory: int, weights: int) -> None:
        pairs = [Pipe() for _ in range(SLOTS)]
        theirs = [end.fileno() for _, end in pairs]
        setup = _Setup(device, cores, self.sides, self.rows, memory, weights, theirs)
        self._ends.append([end for end, _ in pairs])
        errors = tempfile.TemporaryFile()  # read when it has died  # noqa: SIM115
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, msgspec.json.encode(setup).decode()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[memory, weights, *theirs],
                start_new_session=True,  # Ctrl-C is for the parent alone
            )
        )  # fmt: skip
        for _, end in pairs:
            end.close()

    def _greet(self, s: int) -> None:
        """Wait until a server is ready."""
        try:
            self._ends[s][0].recv_bytes()
        except (EOFError, OSError):
            raise ServerFailed(f"{self.name(s)} did not start") from None
        self._pipes |= {end: (s, i) for i, end in enumerate(self._ends[s])}

    @property
    def alive(self) -> set[int]:
        """Servers that have not died."""
        return {s for s, _ in self._pipes.values()}

    def name(self, s: int) -> str:
        """A server in messages."""
        return f"the process of server {s} ({self.places[s].device})"

    def send(self, s: int, slot: int, order: Order) -> None:
        """Give an instance an order; it answers each before the next. A dead one answers too."""
        with suppress(OSError):
            self._ends[s][slot].send_bytes(self._encode(order))

    def receive(self, timeout: float | None = None) -> list[Answer]:
        """What has been answered, once there is something or the time is over.

        Raises
        ------
        ServerFailed
            An order could not be carried out, with the reason.
        """
        found = []
        for end in select.select(list(self._pipes), (), (), timeout)[0]:
            s, slot = self._pipes.get(end, (-1, -1))
            if s < 0:
                continue  # died with its server a moment ago
            try:
                error = end.recv_bytes()
            except (EOFError, OSError):
                self._bury(s)
                found.append(Answer(s, -1))
                continue
            if error:
                raise ServerFailed(f"{self.name(s)}: {error.decode()}")
            found.append(Answer(s, slot))
        return found

    def _bury(self, s: int) -> None:
        self._pipes = {end: at for end, at in self._pipes.items() if at[0] != s}
        for end in self._ends[s]:
            end.close()
        self.processes[s].kill()
        self.processes[s].wait()


class Place(NamedTuple):
    """Where a server runs."""

    device: str
    cores: tuple[int, ...]


def parse_devices(devices: Sequence[str]) -> list[Place]:
    """Where every server runs; `InputError` for what is not there."""
    if isinstance(devices, str) or not all(isinstance(one, str) for one in devices):
        raise InputError(f"devices: expected a list of names, one a server, got {devices!r:.60}")
    known = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    known = known or list(range(available_cores()))
    shared = sum(one == "cpu" for one in devices)
    found: list[Place] = []
    for i, one in enumerate(devices):
        if not re.fullmatch(r"cpu(:[0-9]+(,[0-9]+)*)?|cuda(:[0-9]+)?", one):
            raise InputError(
                f"devices[{i}]: expected cpu, cpu:0,1 (cores) or cuda:0, got {one!r:.60}"
            )
        name, _, rest = one.partition(":")
        if name == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if int(rest or 0) >= count:
                raise InputError(f"devices[{i}]: there is no {one}; this host has {count} GPUs")
            found.append(Place(f"cuda:{rest or 0}", ()))
        elif rest:
            cores = tuple(map(int, rest.split(",")))
            if not set(cores) <= set(known):
                raise InputError(f"devices[{i}]: {one}: the cores here are {known}")
            found.append(Place("cpu", cores))
        else:
            j = sum(before == "cpu" for before in devices[:i])
            own = known[j * len(known) // shared : (j + 1) * len(known) // shared]
            found.append(Place("cpu", tuple(own or [known[j % len(known)]])))
    return found


def row_floats(net: SlimResNet, side: int) -> int:
    """Numbers that a request's largest activations, image or scores have."""
    sizes = [net.in_channels * side**2, net.classes]
    for channels in net.channels:
        sizes.append(channels * side**2)
        side = -(-side // 2)
    return max(sizes)


def _anonymous(size: int) -> Any:
    """A file without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("optsched"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file


def _rows(memory: int, rows: int) -> Tensor:
    """Two buffers of rows, [buffer][row][float]: a segment reads one and writes the other."""
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32).view(2, rows, -1)


# the side of the server


def main() -> None:
    """A server: its slots take orders until the other side is gone."""
    setup = msgspec.json.decode(sys.argv[1], type=_Setup)
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(1)
    net = pickle.loads(mmap.mmap(setup.weights, 0, access=mmap.ACCESS_READ))
    memory = _rows(setup.memory, setup.rows)
    pipes = [Connection(pipe) for pipe in setup.pipes]
    slots = [_Slot(net, memory, setup, pipe) for pipe in pipes]
    threads = [threading.Thread(target=slot.attend, daemon=True) for slot in slots]
    gc.freeze()
    pipes[0].send_bytes(b"")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


class _Slot:
    """A place for an instance: carries out one order after the other."""

    def __init__(self, net: SlimResNet, memory: Tensor, setup: _Setup, pipe: Connection) -> None:
        self.net, self.memory, self.pipe = net, memory, pipe
        self.sides, self.device = setup.sides, torch.device(setup.device)
        self.segment: Segment | None = None
        self.k = 0

    def attend(self) -> None:
        """Until the other side is gone."""
        torch.set_num_threads(1)
        on_gpu = self.device.type == "cuda"
        stream: Any = torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else nullcontext()
        decode = msgspec.msgpack.Decoder(Order).decode
        with suppress(EOFError, OSError), torch.inference_mode(), stream:
            while True:
                order = decode(self.pipe.recv_bytes())
                error = ""
                try:
                    self._carry_out(order)
                except Exception as fault:
                    error = f"{order}: {type(fault).__name__}: {fault}"
                self.pipe.send_bytes(error.encode())

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Execute):
            self._execute(order)
        elif isinstance(order, Load):
            self.k = order.segment
            self.segment = self.net.sliced(order.segment, order.width).to(self.device)
            side = self.sides[self.k]
            for n in (1, 2):  # memory and kernels are there before the first request comes
                x = torch.zeros(n, self.segment.inputs[-1], side, side, device=self.device)
                self.segment(x, order.width, len(self.segment.inputs) - 1)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        else:
            self.segment = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _execute(self, order: Execute) -> None:
        segment, side = self.segment, self.sides[self.k]
        assert segment is not None
        source, target = self.memory[self.k % 2], self.memory[(self.k + 1) % 2]
        parts = []
        for i, rows in order.parts:
            c = segment.inputs[i]
            x = source[:, : c * side**2].index_select(0, torch.tensor(rows))
            parts.append(x.view(-1, c, side, side).to(self.device))
        x = pad(parts) if len(parts) > 1 else parts[0]
        found = segment(x, order.width, order.parts[-1][0]).flatten(1).cpu()
        at = torch.tensor([row for _, rows in order.parts for row in rows])
        target[:, : found.shape[1]].index_copy_(0, at, found)
