"""Collective calls of all ranks, and why they end."""

from __future__ import annotations

import atexit
import os
import pickle
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from optsched.arraypipe.distributed.transport import PeerLost, Stalled, collective
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Made = TypeVar("Made")
_PATIENCE_S: Final = 600.0  # for all ranks to come
_SOON_S: Final = 3.0  # for the sentences of ranks that may have ended


@dataclass(eq=False)
class Group:
    """All ranks: collective calls, and sentences in the store of the process group."""

    group: Any = None  # of gloo; None: the default one
    timeout: float = _PATIENCE_S  # of collective calls, in seconds
    name: str = ""  # keeps the sentences of groups apart; by default that of `group`

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        name = self.name or ("" if self.group is None else self.group.group_name)
        store = distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"optsched/{name}", store)
        self._sent = 0  # values from the first rank so far

    def all(self, local: Made) -> list[Made]:
        """The values of all ranks; `PeerLost` if one has ended."""
        rows = [local] * self.size
        with collective():
            dist.all_gather_object(rows, local, self.group)
        return rows

    def from_first(self, value: Made) -> Made:
        """The value of the first rank."""
        row = [value]
        with collective():
            dist.broadcast_object_list(row, 0, self.group)
        return row[0]

    def broadcast(self, value: Any) -> None:
        """On the first rank: leave the next value for the others."""
        self._store.set(f"value/{self._sent}", pickle.dumps(value))
        self._sent += 1

    def receive(self) -> Any:
        """On another rank: the next value of the first one."""
        self._sent += 1
        with collective():
            key = f"value/{self._sent - 1}"
            self._store.wait([key], timedelta(seconds=self.timeout))
            return pickle.loads(self._store.get(key))  # of our own rank 0

    def agree(self, make: Callable[[], Made], of_first: bool = False) -> Made:
        """Call `make` on all ranks, or on the first one, and raise on all if it raises on some.

        `InputError` with the same sentence if it was refused; else the error where it was raised
        and `PeerLost` elsewhere.
        """
        made: Made | None = None
        failure: Exception | SystemExit | None = None
        try:
            made = None if of_first and self.rank else make()
        except (Exception, SystemExit) as error:  # also what would end this process alone
            failure = error
        refused = isinstance(failure, InputError)
        row = None if failure is None else (refused, reason(failure))
        rows = self.all((row, made if of_first else None))
        failed = [(rank, *row) for rank, (row, _) in enumerate(rows) if row is not None]
        if not failed:
            return cast("Made", rows[0][1] if of_first else made)
        rank, refused, sentence = failed[0]
        if failure is not None and not isinstance(failure, InputError):
            raise failure
        if len(failed) < len(rows) or len({row[2] for row in failed}) > 1:
            sentence = f"rank {rank}: {sentence}"
        raise (InputError if refused else PeerLost)(sentence) from failure

    def abort(self, sentence: str) -> None:
        """Leave word why this rank ends, or what it has waited for."""
        with suppress(RuntimeError):  # the store may have died with rank 0
            self._store.set(f"end/{self.rank}", sentence)
            self._store.compare_set("over", "", f"rank {self.rank}: {sentence}")

    def why(self, sentence: str) -> str:
        """Why another rank has ended, if it says so soon; else the sentence."""
        return self._read("over", time.monotonic() + _SOON_S) or sentence

    def diagnosis(self, whereabouts: str, sentence: str) -> str:
        """The sentence, and what every rank is waiting for, as far as it says so soon."""
        until = time.monotonic() + _SOON_S
        self.abort(whereabouts)
        found = [self._read(f"end/{rank}", until) for rank in range(self.size)]
        lines = [f"device {rank}: {row or 'no word from it'}" for rank, row in enumerate(found)]
        return "\n".join([sentence, *lines])

    def _read(self, key: str, until: float) -> str | None:
        """The value of a key, if it comes until then."""
        with suppress(RuntimeError):
            left = max(0.01, until - time.monotonic())
            self._store.wait([key], timedelta(seconds=left))
            return bytes(self._store.get(key)).decode()
        return None


@contextmanager
def meeting(patience: float = _PATIENCE_S) -> Iterator[Group]:
    """All ranks before there are links, in a group of its own (collective).

    `Stalled` if not all ranks have come within `patience` seconds.
    """
    join()
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
    except RuntimeError as error:
        raise Stalled(
            f"not all of the {dist.get_world_size()} ranks have come to this run within "
            f"{patience:.3g} s; one of them may have ended, or raised before it called us"
        ) from error
    try:
        yield Group(group, patience)
    finally:
        dist.destroy_process_group(group)


def agree(make: Callable[[], Made], patience: float = _PATIENCE_S, of_first: bool = False) -> Made:
    """`Group.agree` in a `meeting`."""
    with meeting(patience) as group:
        return group.agree(make, of_first)


def join() -> None:
    """Make the process group of `torchrun`, if there is none."""
    if not dist.is_available():
        raise InputError("backend: this torch has no torch.distributed; use the inline backend")
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "backend: the process backend needs one process per device; start the script with "
            "torchrun, or call torch.distributed.init_process_group first"
        )
    dist.init_process_group("gloo")
    atexit.register(_leave)  # its threads do not survive the interpreter's end


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
