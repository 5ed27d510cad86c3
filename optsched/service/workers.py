"""Worker processes for long requests: warm, and replaced when they end."""

from __future__ import annotations

import math
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio import to_process

from optsched.service.answers import Reply, answer, refusal
from optsched.service.requests import QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup
    from starlette.types import Receive

    from optsched.service.gate import Metrics
    from optsched.service.settings import Settings

_LOOK: Final = 60.0
"""Seconds between two looks after idle workers, which are stopped after five minutes else."""

GONE: Final = Reply(499, b"")
"""Nobody reads this reply."""


class Workers:
    """A fixed number of processes that answer one request each at a time."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._slots = anyio.CapacityLimiter(settings.workers)
        self._free = anyio.CapacityLimiter(math.inf)
        self._queued = 0

    async def keep(self, group: TaskGroup) -> None:
        """Start all workers, and keep them as long as the group lives."""
        self._group = group
        await self._fill()
        group.start_soon(self._look)

    async def run(self, receive: Receive, call: Callable[..., Reply], *args: Any) -> Reply:
        """Call a function of a module in a worker.

        It is stopped when the client disconnects, or when the time of a request is over.
        """
        if self._slots.available_tokens < 1 and self._queued >= self._settings.queue:
            return refusal(503, "", None, "all workers are busy, the queue is full; try later")
        reply = GONE
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
            return refusal(503, "", None, f"no worker was free for {limit:g} s; try later")
        finally:
            self._queued -= 1
            self._metrics.queue.set(self._queued)
        try:
            self._metrics.workers.inc()
            with anyio.fail_after(limit + 1):
                return await self._call(call, *args)
        except anyio.get_cancelled_exc_class():
            self._lost("disconnect")
            raise
        except TimeoutError:
            self._lost("timeout")
            message = f"it takes more than {limit:g} s; send a smaller one, or raise --timeout"
            return refusal(422, "body", None, message)
        except anyio.BrokenWorkerProcess:
            self._lost("died")
            return refusal(503, "", None, "the worker died and is replaced; send it again")
        finally:
            self._metrics.workers.dec()
            self._slots.release()

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        return await to_process.run_sync(call, *args, cancellable=True, limiter=self._free)

    def _lost(self, why: str) -> None:
        self._metrics.lost.labels(why).inc()
        self._group.start_soon(self._fill)

    async def _fill(self) -> None:
        """Run something in all idle workers at once: those that are missing are started."""
        async with anyio.create_task_group() as group:
            for _ in range(int(self._slots.available_tokens)):
                group.start_soon(self._call, warm)

    async def _look(self) -> None:
        while True:
            await anyio.sleep(_LOOK)
            with suppress(anyio.BrokenWorkerProcess, ExceptionGroup):
                await self._fill()


_is_warm = False


def warm() -> None:
    """Load the kernels of all queries; signals to the group do not end this process."""
    global _is_warm
    if _is_warm:
        return
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    warm_up()
    _is_warm = True


def warm_up(quick: bool = False) -> None:
    """Answer the examples, or those of quick queries."""
    for name, query in QUERIES.items():
        if query.quick or not quick:
            answer(name, msgspec.json.encode(query.example), 10.0)
