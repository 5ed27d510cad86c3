"""Worker processes for long requests: warm, and replaced when they end."""

from __future__ import annotations

import math
import signal
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio import to_process

from optsched.service.answers import LOGGER, Reply, answer, refusal
from optsched.service.queries import QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup
    from starlette.types import Receive

    from optsched.service.gate import Metrics
    from optsched.service.settings import Settings

_PAUSE: Final = 60.0
"""Seconds until all idle workers are used: after five minutes without use one would be stopped."""


class Workers:
    """A fixed number of processes that answer one request each at a time."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._slots = anyio.Semaphore(settings.workers)
        self._call = partial(
            to_process.run_sync, cancellable=True, limiter=anyio.CapacityLimiter(math.inf)
        )
        self._queued = 0

    async def keep(self, group: TaskGroup) -> None:
        """Start all workers, and keep them as long as the group lives."""
        self._group = group
        await self._use_all()
        group.start_soon(self._again)

    async def run(self, receive: Receive, call: Callable[..., Reply], *args: Any) -> Reply:
        """Call a function of a module in a worker.

        It is stopped when the client disconnects, or when the time of a request is over.
        """
        if self._slots.value < 1 and self._queued >= self._settings.queue:
            text = "expected a free worker, all are busy and the queue is full; try later"
            return refusal(503, "workers", self._queued, text)
        reply = Reply(499, b"")  # to a client that has disconnected
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            reply = await self._queue(call, args)
            group.cancel_scope.cancel()
        return reply

    async def _queue(self, call: Callable[..., Reply], args: tuple[Any, ...]) -> Reply:
        """Get a slot and run."""
        limit = self._settings.timeout
        self._queued += 1
        self._metrics.queue.set(self._queued)
        try:
            with anyio.fail_after(limit):
                await self._slots.acquire()
        except TimeoutError:
            text = f"expected a free worker within {limit:g} s, all are busy; try later"
            return refusal(503, "workers", self._queued, text)
        finally:
            self._queued -= 1
            self._metrics.queue.set(self._queued)
        lost = "disconnect"
        self._metrics.workers.inc()
        try:
            with anyio.fail_after(limit + 1):
                reply: Reply = await self._call(call, *args)
            lost = ""
        except TimeoutError:
            lost = "timeout"
            text = f"expected work for at most {limit:g} s; send less, or raise --timeout"
            reply = refusal(422, "body", None, text)
        except anyio.BrokenWorkerProcess:
            lost = "died"
            reply = refusal(503, "workers", None, "the worker died and is replaced; try again")
        finally:
            self._metrics.workers.dec()
            if lost:
                self._metrics.lost.labels(lost).inc()
                self._group.start_soon(self._use)
            else:
                self._slots.release()
        return reply

    async def _use(self) -> None:
        """Warm up a worker, a new one if none is idle, and release the slot."""
        while True:
            try:
                await self._call(warm)
                break
            except anyio.BrokenWorkerProcess as error:
                LOGGER.error("a worker does not start (%s), next try in 1 s", error)
                await anyio.sleep(1)
        self._slots.release()

    async def _use_all(self) -> None:
        """Warm up as many workers as there are free slots."""
        async with anyio.create_task_group() as group:
            for _ in range(self._slots.value):
                self._slots.acquire_nowait()
                group.start_soon(self._use)

    async def _again(self) -> None:
        while True:
            await anyio.sleep(_PAUSE)
            await self._use_all()


@cache
def warm() -> None:
    """Load the kernels of all queries; signals to the group do not end this process."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    warm_up()


def warm_up(quick: bool = False) -> None:
    """Answer the examples of all queries, or of quick queries alone."""
    for name, query in QUERIES.items():
        if query.quick or not quick:
            answer(name, msgspec.json.encode(query.example), 10.0)
