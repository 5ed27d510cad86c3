"""The ranks as one: they agree, hear what the first one says, and end with one sentence."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from optsched.arraypipe.distributed.transport import PeerLost, Stalled, hearing
from optsched.arraypipe.runtime.environment import set_queues
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Made = TypeVar("Made")
_PATIENCE_S: Final = 600.0  # for all ranks to come
_SOON_S: Final = 3.0  # for the words of ranks that may have ended
_FIRST_S: Final = 10.0  # for the first rank to say why all end
_LATE_S: Final = 60.0  # for ranks to end after the first, if nothing went wrong there
_LONGEST_S: Final = 0.05  # between two looks at the store
_BEATS: Final = 4  # signs of life within the timeout


@dataclass(eq=False)
class Group:
    """All ranks: collective calls, and words through the store, which wait for nobody."""

    group: Any = None  # of gloo; None: the default one
    timeout: float = _PATIENCE_S  # seconds without a sign of life after which nobody is waited for
    name: str = ""  # keeps the words of groups apart; by default that of `group`

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        name = self.name or ("" if self.group is None else self.group.group_name)
        store = distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"optsched/{name}", store)
        self._said = 0  # values that the first rank has said, or that this one has heard
        self._due_ns = 0  # when to give the next sign of life

    # collective

    def all(self, own: Made) -> list[Made]:
        """What every rank has; `PeerLost` if one has ended."""
        rows = [own] * self.size
        with hearing():
            dist.all_gather_object(rows, own, self.group)
        return rows

    def agree(self, make: Callable[[], Made], of_first: bool = False) -> Made:
        """What it makes, here or on the first rank alone; if it raises on some, all end with that.

        With `InputError` and the same sentence if it was refused, else with its own error where it
        was raised and `PeerLost` elsewhere.
        """
        made: Made | None = None
        failure: Exception | SystemExit | None = None
        try:
            made = None if of_first and self.rank else make()
        except (Exception, SystemExit) as error:  # also what would end this process alone
            failure = error
        refused = isinstance(failure, InputError)
        word = None if failure is None else (refused, reason(failure))
        rows = self.all((word, made if of_first else None))
        said = [(rank, *row) for rank, (row, _) in enumerate(rows) if row is not None]
        if not said:
            return cast("Made", rows[0][1] if of_first else made)
        rank, refused, sentence = said[0]
        if failure is not None and not isinstance(failure, InputError):
            raise failure
        if len(said) < len(rows) or len({row[2] for row in said}) > 1:
            sentence = f"rank {rank}: {sentence}"
        raise (InputError if refused else PeerLost)(sentence) from failure

    # from the first rank to the others

    def broadcast(self, value: Any) -> None:
        """On the first rank: say the next value to the others."""
        self._store.set(f"said/{self._said}", pickle.dumps(value))
        self._said += 1

    def hear(self) -> Any:
        """On another rank: wait for the next value, for as long as any rank gets on."""
        self._said += 1
        return pickle.loads(self._await(f"said/{self._said - 1}"))  # of our own rank 0

    def beat(self, now_ns: int) -> None:
        """Show now and then that this rank gets on, to ranks that wait."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + int(1e9 * self.timeout / _BEATS)
            with suppress(RuntimeError):  # whoever misses the store will say so
                self._store.add("beats", 1)

    def assemble(self) -> None:
        """Wait until all ranks have come here, for as long as any of them gets on."""
        with suppress(RuntimeError):
            self._store.set(f"here/{self.rank}", "")
        for rank in range(self.size):
            self._await(f"here/{rank}")

    # the end of all

    def abort(self, sentence: str) -> None:
        """Say why this rank ends, or what it has waited for: no rank goes on."""
        with suppress(RuntimeError):  # the store may have died with rank 0
            self._store.set(f"word/{self.rank}", sentence)
            self._store.compare_set("over", "", f"rank {self.rank}: {sentence}")

    def why(self, sentence: str) -> str:
        """Why another rank has ended, if it says so soon; else the sentence."""
        return self._word("over", time.monotonic() + _SOON_S) or sentence

    def diagnosis(self, whereabouts: str, sentence: str) -> str:
        """The sentence, and what every rank is waiting for, as far as it says so soon."""
        until = time.monotonic() + _SOON_S
        self.abort(whereabouts)
        words = [self._word(f"word/{rank}", until) for rank in range(self.size)]
        lines = [f"device {rank}: {word or 'no word from it'}" for rank, word in enumerate(words)]
        return "\n".join([sentence, *lines])

    def end(self, code: int, error: str, lost: bool, say: Callable[[str], None]) -> int:
        """How the program ends here; the exit code of all ranks, when the first has said why.

        `code` and `error` are of this rank (``""`` if it has done all it had to); `lost`: the error
        tells of another rank, whose own counts if it has a word; `say` prints a sentence.
        """
        try:
            self._store.set(f"end/{self.rank}", json.dumps([lost, self.rank, code, error]))
            if not self.rank:
                return self._last_word(code, _SOON_S if error else _LATE_S, say)
            told = self._word("told", time.monotonic() + (_FIRST_S if error else 1e6))
            if told is not None:
                self._store.add("gone", 1)
                return int(told)
        except RuntimeError:  # the first rank is gone, and the store with it
            pass
        if error != "interrupted":
            say(error or "failed: rank 0 has ended")
        return code or 1

    def _last_word(self, code: int, patience: float, say: Callable[[str], None]) -> int:
        """On the first rank: say why all end; stay until the others, who need the store, know."""
        until = time.monotonic() + patience
        words = [self._word(f"end/{rank}", until) for rank in range(self.size)]
        known = [json.loads(word) for word in words if word is not None]
        errors = sorted(row for row in known if row[3])
        if errors:
            _, rank, code, error = errors[0]
            say(f"{error} (rank {rank})" if rank else error)
        self._store.set("told", str(code))
        until = time.monotonic() + _FIRST_S
        while time.monotonic() < until and self._store.add("gone", 0) < len(known) - 1:
            time.sleep(_LONGEST_S)
        return code

    def _word(self, key: str, until: float) -> str | None:
        """What is said under a key until then."""
        with suppress(RuntimeError):
            left = max(0.01, until - time.monotonic())
            self._store.wait([key], timedelta(seconds=left))
            return bytes(self._store.get(key)).decode()
        return None

    def _await(self, key: str) -> bytes:
        """Wait for a word for as long as any rank gets on: who waits here has nothing else to do.

        A rank may be without work for hours, while jobs on other devices go on.
        """
        pause, until, seen = 0.001, 0.0, -1
        try:
            while not self._store.check([key]):
                if self._store.check(["over"]):
                    raise PeerLost("another rank has ended")
                if (now := time.monotonic()) > until:
                    beats = self._store.add("beats", 0)
                    if beats == seen:
                        raise Stalled(f"no rank has done a block for {self.timeout:.3g} s")
                    seen, until = beats, now + self.timeout
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise PeerLost("the store is lost, the process that has it has ended") from error


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
    """Make the process group of `torchrun`, if nobody has made one."""
    set_queues()
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
