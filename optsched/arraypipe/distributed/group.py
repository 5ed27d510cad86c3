"""Collective calls of all ranks, and why they end."""

from __future__ import annotations

import atexit
import os
import pickle
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from optsched.arraypipe.runtime.state import PeerLost
from optsched.errors import InputError, OptschedError
from optsched.solving.fan_out import end_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Made = TypeVar("Made")
_PATIENCE_S: Final = 600.0  # for all ranks to come
_SOON_S: Final = 2.0  # for the sentence of a rank that has ended


class Stalled(OptschedError):
    """Nothing has arrived for longer than the timeout."""


@contextmanager
def collective() -> Iterator[None]:
    """Turn what gloo raises in a collective call into `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise lost("another rank", error) from error


def lost(peer: str, error: RuntimeError) -> PeerLost:
    """Return the error of a connection, with the first sentence of gloo."""
    # gloo: "[/where/file.cc:537] Read error [address]: what. A hint for its own developers."
    first = str(error).strip().splitlines()[0]
    line = (first.partition("] ")[2] or first).partition(". ")[0]
    return PeerLost(f"the connection to {peer} is lost, its run has ended ({line})")


@dataclass(eq=False)
class Group:
    """All ranks: collective calls, and a store in which the first rank to fail says why."""

    group: Any = None  # of gloo; None: the default one
    timeout: float = _PATIENCE_S  # of collective calls, in seconds
    name: str = ""  # keeps the entries of groups apart; by default that of `group`

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        name = self.name or ("" if self.group is None else self.group.group_name)
        store = distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"optsched/{name}", store)
        self._sent = 0  # values from the first rank so far

    def all(self, local: Made) -> list[Made]:
        """Return the values of all ranks; `PeerLost` if one has ended."""
        rows = [local] * self.size
        with collective():
            dist.all_gather_object(rows, local, self.group)
        return rows

    def from_first(self, value: Made) -> Made:
        """Return the value of the first rank."""
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
        row = None if failure is None else (refused, _sentence(failure))
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

    @contextmanager
    def explained(self, where: Callable[[], str] | None = None) -> Iterator[None]:
        """End all ranks with the sentence of an error of one of them.

        A lost connection is explained by the first rank that ended, if it has said why; else by
        `where` this rank was.
        """
        try:
            yield
        except (PeerLost, Stalled) as error:
            with suppress(RuntimeError):  # no sentence; or the store has died with rank 0
                self._store.wait(["ended"], timedelta(seconds=_SOON_S))
                raise type(error)(self._store.get("ended").decode()) from error
            found = str(error) if where is None else f"{error}; {where()}"
            self._end(found)
            raise type(error)(found) from error
        except BaseException as error:  # the others will only see that this process is gone
            self._end(_sentence(error))
            raise

    def _end(self, sentence: str) -> None:
        """Leave the sentence, unless another rank has ended before."""
        with suppress(RuntimeError):
            self._store.compare_set("ended", "", f"rank {self.rank}: {sentence}")


@contextmanager
def meeting(patience: float = _PATIENCE_S) -> Iterator[Group]:
    """All ranks before there are links, in a group of its own (collective)."""
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
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # an agent that is started again starts this rank again
    dist.init_process_group("gloo")
    # its threads do not survive the interpreter's end
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, OptschedError) else f"{type(error).__name__}: {error}"
