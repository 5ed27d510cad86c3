"""Live clusters: every change is made once, and is in a journal before it is answered."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import re
import time
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError
from optsched.io.strict_json import check_format, format_json, parse, placed
from optsched.service.answers import Refused
from optsched.service.changes import Change, Changed, Conflict, Decision, Once
from optsched.service.journal import Journal, StorageError
from optsched.service.known import Known, Status
from optsched.service.requests import snapshot_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT: Final = "optsched.journal/1"
SUFFIX: Final = ".journal"
MOST_CLUSTERS: Final = 100

IDS: Final = 20_000
"""So many answers at least are kept for repeated ids; at twice as many the journal is rewritten."""

BATCH: Final = 256
"""Most requests that share one write to the disk."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = logging.getLogger(__name__)


class Create(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Start a live cluster from a snapshot."""

    id: Once
    snapshot: dict[str, Any]
    """``optsched.snapshot/1``."""
    model: dict[str, Any] | None = None
    """``optsched.bandwidth/1``; by default links and network cards."""


class First(msgspec.Struct, kw_only=True):
    """First line of a journal: the cluster from whose version it goes on."""

    format: str = FORMAT
    name: str
    time: int
    version: int = 0
    model: Any = None
    snapshot: Any
    answers: dict[str, tuple[str, msgspec.Raw]] = {}
    """Digests and answers of the latest requests by id."""


class Record(msgspec.Struct, frozen=True):
    """A request in a journal; those of a line were written together."""

    id: str
    digest: str
    answer: msgspec.Raw
    steps: list[list[Any]]


class LiveCluster(Known):
    """A cluster with its journal and the answers to its latest requests."""

    def __init__(self, first: First, place: str) -> None:
        found, model = snapshot_of(first.snapshot, first.model, place)
        super().__init__(found, model, first.version, first.time, first.name)
        self.model_document = first.model
        self._first = msgspec.structs.replace(first, snapshot=None, answers={})
        self._spare = 0  # further answers before the journal is rewritten: after a failure
        self._answers = {key: (one[0], bytes(one[1])) for key, one in first.answers.items()}
        self._journal: Journal
        self._queue: list[tuple[Change, asyncio.Future[bytes]]] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def create(cls, path: Path, request: Create) -> LiveCluster:
        """Write the journal of a new cluster."""
        first = First(
            name=path.name.removesuffix(SUFFIX), time=int(time.time()), model=request.model,
            snapshot=request.snapshot,
        )  # fmt: skip
        found = cls(first, "")
        answer = msgspec.json.encode(Changed(version=0, free=len(found.status.state.free)))
        found._answers = {request.id: (_digest(request), answer)}
        first.answers = {request.id: (_digest(request), msgspec.Raw(answer))}
        found._journal = Journal.create(path, msgspec.json.encode(first))
        return found

    @classmethod
    def open(cls, path: Path) -> LiveCluster:
        """Read a journal and make its changes."""
        journal, lines = Journal.open(path)
        with placed(f"{path}:1: "):
            check_format(parse(lines[0].decode(), ""), FORMAT, "journal")
            first = msgspec.json.decode(lines[0], type=First)
            if first.name != path.name.removesuffix(SUFFIX):
                text = f"the journal of the cluster {format_json(first.name)}"
                raise InputError(f"name: {text}; rename the file to {first.name:.64}{SUFFIX}")
            found = cls(first, "journal: ")
        found._journal = journal
        for number, line in enumerate(lines[1:], 2):
            with placed(f"{path}:{number}: "):
                for record in msgspec.json.decode(line, type=list[Record]):
                    found.status = found.status.after(record.steps)
                    found._answers[record.id] = record.digest, bytes(record.answer)
        return found

    def commit(self, requests: Sequence[Change]) -> list[bytes | Exception]:
        """Make changes one after the other, write them to the disk, and return the answers.

        A request that is refused changes nothing, and its id stays unused. After a failed write
        all of them are refused.
        """
        status, records = self.status, list[Record]()
        answers: list[bytes | Exception] = []
        new: dict[str, tuple[str, bytes]] = {}
        for request in requests:
            try:
                digest, answer = self.known(request, new)
                if answer is None:
                    made = Decision(status, self.model, self.dispatchers).make(request)
                    answer, status = msgspec.json.encode(made.answer), made.status
                    new[request.id] = digest, answer
                    records.append(Record(request.id, digest, msgspec.Raw(answer), made.steps))
                answers.append(answer)
            except Exception as error:
                answers.append(error)
        if records:
            try:
                self._journal.append(msgspec.json.encode(records))
            except StorageError as error:
                return [error] * len(requests)
            self.status = status
            self._answers |= new
            if len(self._answers) >= 2 * IDS + self._spare:
                self._rewrite()
        return answers

    def known(
        self, request: Change | Create, new: Mapping[str, tuple[str, bytes]] = MappingProxyType({})
    ) -> tuple[str, bytes | None]:
        """Return the digest of a request, and its answer if it is known or among the `new` ones."""
        digest = _digest(request)
        found = new.get(request.id) or self._answers.get(request.id)
        if found is not None and found[0] != digest:
            raise Conflict(f"id: {request.id!r:.60} is of another request", request.id)
        return found or (digest, None)

    def _rewrite(self) -> None:
        """Replace the journal by one of the present state and the latest answers."""
        kept = dict(islice(self._answers.items(), len(self._answers) - IDS, None))
        snapshot = self.status.snapshot(self.name)
        first = msgspec.structs.replace(
            self._first, time=snapshot.now, version=self.status.version,
            snapshot=msgspec.Raw(msgspec.json.format(snapshot.to_json(), indent=-1)),
            answers={key: (one[0], msgspec.Raw(one[1])) for key, one in kept.items()},
        )  # fmt: skip
        try:
            new = Journal.create(self._journal.path, msgspec.json.encode(first))
        except StorageError as error:
            _log.warning("the journal is not rewritten: %s", error)
            self._spare = len(self._answers) - IDS
            return
        self._journal.close()
        self._journal, self._answers, self._spare = new, kept, 0
        self.status = Status.of(snapshot, self.status.version, snapshot.now)

    async def change(self, request: Change) -> bytes:
        """Answer a request when it is on the disk; requests that arrive together share a write."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        return await future

    async def _write(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
            try:
                found = await asyncio.to_thread(self.commit, [request for request, _ in batch])
            except Exception as error:
                found = [error] * len(batch)
            for (_, future), answer in zip(batch, found, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def finish(self) -> None:
        """Wait until the queue is empty."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class Live:
    """The live clusters of one folder, which no other process may use meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clusters = folder.resolve(), dict[str, LiveCluster]()
        self._creating = asyncio.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another service uses this folder; stop it first") from None
        except OSError as error:
            why = "a file, expected a folder" if folder.is_file() else error.strerror
            raise InputError(f"{folder}: cannot be written ({why})") from None
        try:
            for path in self.folder.glob(".optsched-*.tmp"):
                path.unlink()  # of a process that was killed while it rewrote a journal
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                self.clusters[path.name.removesuffix(SUFFIX)] = LiveCluster.open(path)
        except BaseException:
            self.close()
            raise

    def find(self, name: str) -> LiveCluster:
        """Return the cluster of a name."""
        if (found := self.clusters.get(name)) is None:
            known = ", ".join(self.clusters) or "none"
            text = f"name: no live cluster {name!r:.60}; known: {known:.200}"
            raise Refused(404, text, name[:60])
        return found

    async def create(self, name: str, request: Create) -> bytes:
        """Create a cluster; the same request again gets the first answer."""
        if not _NAME.fullmatch(name):
            raise InputError(
                f"name: expected up to 64 letters, digits, '.', '_' and '-', got {name!r:.80}"
            )
        async with self._creating:
            if (found := self.clusters.get(name)) is not None:
                if (answer := found.known(request)[1]) is not None:
                    return answer
                raise Conflict(f"name: there is a cluster {name!r} already", name)
            if len(self.clusters) >= MOST_CLUSTERS:
                raise InputError(f"name: there are {MOST_CLUSTERS} clusters already")
            path = self.folder / f"{name}{SUFFIX}"
            if path.exists():
                raise InputError(f"name: {path} exists: start the service again to open it")
            found = await asyncio.to_thread(LiveCluster.create, path, request)
            self.clusters[name] = found
            return found.known(request)[1] or b""

    async def finish(self) -> None:
        """Make all changes that are queued, and close."""
        for one in self.clusters.values():
            await one.finish()
        self.close()

    def close(self) -> None:
        """Close all journals and let others use the folder."""
        for one in self.clusters.values():
            one.close()
        self._lock.close()


def _digest(request: Change | Create) -> str:
    """Return a hash of a request, independent of the order of its fields."""
    content = msgspec.json.encode([type(request).__name__, request], order="deterministic")
    return hashlib.blake2b(content, digest_size=12).hexdigest()
