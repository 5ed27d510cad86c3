"""Answer images that any thread submits, by the servers of an executor; telemetry."""

from __future__ import annotations

import gc
import math
import threading
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from optsched.errors import InputError
from optsched.io.values import frozen, integer
from optsched.serving import core
from optsched.serving.executor import DeadlineMissed, Executor, Loop, RequestsLost
from optsched.serving.log import percentile
from optsched.serving.tables import NEVER, NS_PER_MS, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Self

    from torch import Tensor

    from optsched.errors import OptschedError

_RECENT: Final = 1024  # latencies that telemetry summarises


class Answer(NamedTuple):
    """Answer to a request: scores, indices of the widths that it was run at, latency.

    The latency is without the time during which an earlier answer of its key was awaited.

    Examples
    --------
    >>> import torch
    >>> answer = optsched.serving.Answer(torch.tensor([0.1, 2.0]), widths=(0, 3), ms=4.2)
    >>> int(answer.output.argmax()), answer.late
    (1, False)
    """

    output: Tensor
    widths: tuple[int, ...]
    ms: float
    late: bool = False
    """Whether the deadline had passed."""


class ServerState(NamedTuple):
    """State of a server: queued work, running batches, resident instances, utilisation.

    `utilisation` is the share of time with a running batch since the last call of `telemetry`.
    Memory and power are those of the GPU by NVML; None where `note` says why.
    """

    id: int | str
    device: str
    alive: bool
    queued_ms: float
    running: int
    instances: int
    utilisation: float
    vram_mb: float | None
    watts: float | None
    note: str


class Telemetry(NamedTuple):
    """State of a live server; latencies are those of the last 1024 answers.

    Examples
    --------
    >>> [one.alive for one in server.telemetry().servers]  # doctest: +SKIP
    [True, True]
    """

    waiting: int
    """Requests at the router."""
    in_progress: int
    servers: list[ServerState]
    answered: int
    late: int
    shed: int
    lost: int
    mean_ms: float | None
    p99_ms: float | None


class LiveServer(Loop):
    """Answers images that are submitted by any thread; a context manager.

    Until it stops, garbage collection leaves out objects made before it (`gc.freeze`), unless the
    process has frozen objects already.

    Parameters
    ----------
    executor
        Network, servers, router and plan; of its scenario no requests are used.
    shape
        Of an image, without a batch dimension.
    capacity
        Maximum number of requests in progress; then `submit` blocks.

    Examples
    --------
    >>> with LiveServer(executor, shape=(3, 32, 32)) as server:  # doctest: +SKIP
    ...     answer = server.submit(image, deadline=50).result()
    """

    def __init__(self, executor: Executor, shape: Sequence[int], capacity: int = 4096) -> None:
        servers = executor.servers(shape, integer("capacity", capacity, 1, 2**20))
        n = servers.rows
        idle = executor.scenario.replace(arrival_ms=np.zeros(n), deadline_ms=None)
        with ExitStack() as stack:
            stack.enter_context(servers)
            super().__init__(servers, idle, *executor.given, keep=False)
            stack.pop_all()  # the thread ends the servers
        self.shape = tuple(shape)
        self._times = np.zeros((2, n), np.int64)
        """Arrival and deadline by request."""
        views = [frozen(one.view()) for one in self._times]
        self._use(self.world._replace(arrival=views[0], deadline=views[1]))
        self._inbox: deque[tuple[int, int, int, Future[Answer], Hashable]] = deque()
        self._futures: dict[int, tuple[Future[Answer], Hashable]] = {}
        self._lines: dict[Hashable, deque[Future[Answer]]] = {}  # open futures by key, in order
        self._ends: dict[Future[Answer], Callable[[], object]] = {}  # of futures that are not first
        self._lock, self._rows = threading.Lock(), threading.Semaphore(n)
        self._stopping, self._error = False, None
        self._tally: Counter[str] = Counter()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._seen = 0, self.busy.copy()
        self._froze = gc.get_freeze_count() == 0  # else it is not ours to undo
        if self._froze:
            gc.collect()
            gc.freeze()  # a full collection of all objects of torch takes 0.2 s
        self._thread = threading.Thread(target=self._serve, name="optsched-serving", daemon=True)
        self._thread.start()

    _error: BaseException | None

    def submit(
        self, image: Any, deadline: float | None = None, key: Hashable = None
    ) -> Future[Answer]:
        """Submit an image; its answer, or the reason why there is none, comes by the future.

        Blocks while `capacity` requests are in progress. Callbacks of the future run in the thread
        that serves: they should be short.

        Parameters
        ----------
        image
            Floats of the server's shape.
        deadline
            ms from now until which the answer is due; None: no deadline. A request that is shed
            raises `DeadlineMissed`; a late one is answered.
        key
            Such as a camera: futures of one key are done in the order of their submission, those
            without an answer included; None: as soon as possible.

        Raises
        ------
        InputError
            An argument is wrong, or the server was stopped.
        RequestsLost
            The server has ended: all processes died, or the router failed.
        """
        now = self.now()
        try:
            given = torch.as_tensor(image).detach().cpu().to_dense()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"image: expected floats, got {image!r:.60}") from None
        if tuple(given.shape) != self.shape or not given.is_floating_point():
            raise InputError(
                f"image: expected floats of shape {self.shape}, got {given.dtype} of shape "
                f"{list(given.shape)}"
            )
        try:
            hash(key)
        except Exception:
            raise InputError(f"key: expected a hashable value, got {key!r:.60}") from None
        due = NEVER
        if deadline is not None and deadline != math.inf:
            due = now + round(milliseconds("deadline", deadline) * NS_PER_MS)
        pixels = given.to(torch.float32).flatten().numpy()
        if not self._rows.acquire(blocking=threading.current_thread() is not self._thread):
            raise InputError("submit: all rows are in use, and a callback of a future cannot wait")
        future: Future[Answer] = Future()
        with self._lock:
            if self._stopping:
                self._rows.release()
                text = "submit: the server takes no images"
                if self._error is None:
                    raise InputError(f"{text}: it was stopped")
                raise RequestsLost(f"{text}: {self._error}") from self._error
            row = self.free.pop()
            self.memory[0, row, : len(pixels)] = pixels
            self._inbox.append((row, now, due, future, key))
            self.servers.wake()
        return future

    def telemetry(self) -> Telemetry:
        """Return the present state; may be called by any thread."""
        state, now, busy = self.world, self.now(), self.busy.copy()
        (since, before), self._seen = self._seen, (now, busy)
        alive, rows = self.servers.alive, state.core.server
        servers = [
            ServerState(
                one.id, self.servers.places[s][0], s in alive, float(rows["queued"][s]) / NS_PER_MS,
                int(rows["running"][s]), int((state.core.instance["state"][s] != core.EMPTY).sum()),
                float(min(1.0, (busy[s] - before[s]) / max(now - since, 1))),
                *_nvml(self.servers.places[s][0]),
            )
            for s, one in enumerate(self.scenario.servers)
        ]  # fmt: skip
        ms, ends = np.sort(np.array(self._recent)), self._tally
        return Telemetry(
            int(state.fifo["images"].sum()),
            len(self._futures) + len(self._ends) + len(self._inbox),
            servers, ends["answered"], ends["late"], ends["shed"], ends["lost"],
            float(ms.mean()) if len(ms) else None, percentile(ms, 99),
        )  # fmt: skip

    def stop(self, timeout: float | None = None) -> None:
        """Take no more images, answer those in progress, and end the servers.

        After `timeout` seconds, requests that are still in progress get `RequestsLost`.
        """
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self.servers.wake()
        if threading.current_thread() is self._thread:
            return  # from a callback of a future
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._error = RequestsLost("the server was stopped")
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(None if kind is None else 0.0)

    def _serve(self) -> None:
        """Serve until stopped and all requests are done."""
        try:
            while self._error is None:
                if self._stopping and not (self._inbox or self._futures):
                    break
                self.step()
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._stopping = True
            self._rows.release(self.scenario.n_requests)  # wakes threads in `submit`
            reason = self._error or RequestsLost("the server was stopped")
            open_ = [*self._futures.values(), *(one[-2:] for one in self._inbox)]
            self._tally["lost"] += len(open_)
            self._futures, self._inbox = {}, deque()
            for future, key in open_:
                with suppress(Exception):
                    self._complete(future, key, partial(future.set_exception, reason))
            if self._froze:
                gc.unfreeze()
            self.servers.__exit__()

    def accept(self) -> None:
        """Process the requests that were submitted."""
        while self._inbox:
            row, at, due, future, key = self._inbox.popleft()
            if not future.set_running_or_notify_cancel():
                self.free.append(row)
                self._rows.release()
                continue
            self._times[:, row] = at, due
            self.world.trace["deadlines"] |= due < NEVER
            self._futures[row] = future, key
            if key is not None:
                self._lines.setdefault(key, deque()).append(future)
            self.arrive(row, self.now())

    def answer(self, requests: Any, outputs: Any) -> None:
        """Set the results of futures."""
        now, state = self.now(), self.world
        latency = now - self._times[0, requests]
        widths = self.scenario.tuples[state.request["tuple"][requests]].tolist()
        late = now > self._times[1, requests]
        self._tally.update(answered=len(requests), late=int(late.sum()))
        self._recent.extend((latency / NS_PER_MS).tolist())
        scores = torch.from_numpy(outputs).unflatten(1, self.outputs)
        rows = zip(requests.tolist(), scores, widths, latency.tolist(), late.tolist(), strict=True)
        for r, x, row, ns, after in rows:
            future, key = self._futures.pop(r)
            found = Answer(x.clone(), tuple(row), ns / NS_PER_MS, after)
            self._complete(future, key, partial(future.set_result, found))

    def _complete(self, future: Future[Answer], key: Hashable, end: Callable[[], object]) -> None:
        """Call the end of a future, after those of all earlier futures of its key."""
        line = self._lines.get(key) or deque([future])
        self._ends[future] = end
        while line and line[0] in self._ends:
            self._rows.release()
            self._ends.pop(line.popleft())()
        if not line:
            self._lines.pop(key, None)

    def refuse(self, requests: list[int], error: OptschedError) -> None:
        """Set the exceptions of futures."""
        self._tally["shed" if isinstance(error, DeadlineMissed) else "lost"] += len(requests)
        for r in requests:
            future, key = self._futures.pop(r)
            self._complete(future, key, partial(future.set_exception, error))


def _nvml(device: str) -> tuple[float | None, float | None, str]:
    """Memory in MB and power in W of a GPU, or the reason why they are not known."""
    if not device.startswith("cuda"):
        return None, None, "no GPU"
    try:
        used, power = torch.cuda.device_memory_used(device), torch.cuda.power_draw(device)
    except Exception as error:  # of NVML or its package
        return None, None, f"NVML: {type(error).__name__}: {error}"
    return used / 1e6, power / 1e3, ""
