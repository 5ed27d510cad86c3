"""Worker processes of this host for the pool of another host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from optsched.elastic import door
from optsched.elastic.workers import RUN_ENDED, Setting, forkserver_context, hello, work
from optsched.errors import InputError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POLL_S: Final = 0.05
_PATIENCE_S: Final = 60  # in which a pool that cannot be reached may come back
_GRACE_S: Final = 2  # in which a process reads the last message of a pool


def join(
    address: str, devices: Sequence[str], token: str | None = None,
    on_change: Callable[[str], object] = lambda text: None,
) -> None:  # fmt: skip
    """Train in processes of this host, one a device, until the pool at ``HOST:PORT`` ends.

    A process that dies, or that the pool drops, is replaced by a new one. It is an `InputError` if
    there is no pool, it is full, or has another token, other versions or a folder not seen here,
    and an `OptschedError` if the pool is gone before the end of its run.
    """
    place, key = door.address_of("join", address), door.token_of(token)
    workers: list[_Worker] = []
    due = [(device, 0.0) for device in devices]  # and the time at which trying ends
    ended = gone = False
    try:
        while workers or due:
            if due:
                device, until = due.pop(0)
                try:
                    workers.append(_Worker(place, key, device))
                    on_change(f"{device}: process {workers[-1].pid} joined {address}")
                except (ConnectionError, InputError) as error:
                    if not until and isinstance(error, InputError):
                        raise
                    if not until:
                        raise InputError(f"join: {error}; start the pool first") from None
                    if isinstance(error, (ConnectionRefusedError, InputError)):
                        on_change(f"{device}: left, {error}")
                        gone |= isinstance(error, ConnectionRefusedError)
                    elif time.monotonic() > until:
                        raise OptschedError(f"join: {error}, for {_PATIENCE_S} s") from None
                    else:
                        due.append((device, until))
            time.sleep(_POLL_S)
            for worker in [one for one in workers if one.ended()]:
                ended |= worker.run_ended()
                worker.close()
                workers.remove(worker)
                due.append((worker.device, time.monotonic() + _PATIENCE_S))
    finally:
        for worker in workers:
            worker.close()
    if gone and not ended:
        what = "is gone before the end of its run; start it with --resume, then join again"
        raise OptschedError(f"join: the pool at {address} {what}")


class _Worker:
    """A process with its connection to the pool; the end of one is the end of both."""

    def __init__(self, place: tuple[str, int], token: bytes, device: str) -> None:
        self.device = device
        self._connection, welcome = door.connect(place, token, hello(device))
        folder = Path(welcome["folder"])
        if not (folder / ".lock").exists():
            self._connection.close()
            raise InputError(f"folder: {folder} of the run is not seen from this host")
        interface = door.interface_of(door.local_host(self._connection))
        given = self._connection, Setting(welcome["modules"], welcome["store"], interface)
        context = forkserver_context(welcome["modules"])
        self._process: Any = context.Process(target=work, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Whether the process has died, or the pool has closed the connection."""
        return door.hung_up(self._connection) or not self._process.is_alive()

    def run_ended(self) -> bool:
        """Whether the pool has reported the end of its run to the process."""
        self._process.join(_GRACE_S)
        return bool(self._process.exitcode == RUN_ENDED)

    def close(self) -> None:
        """End the process, then the connection."""
        self._process.kill()
        self._process.join()
        self._connection.close()
