"""Live clusters: every change is applied once, and kept in a journal before it is answered."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth import BottleneckBandwidth
from optsched.bandwidth.models import model_document
from optsched.errors import InputError, OptschedError
from optsched.io.strict_json import decode_document, format_json, parse, placed
from optsched.plan import snapshot as documents
from optsched.service.changes import Change, Create, Rules, Status
from optsched.service.journal import Journal, StorageError, read_former

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FORMAT: Final = "optsched.journal/1"
SUFFIX: Final = ".journal"
MOST_CLUSTERS: Final = 100

RECORDS: Final = 50_000
"""Changes in a journal after which it starts again; so many ids at least are remembered."""

BATCH: Final = 256
"""Most requests that share one write to the disk."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = logging.getLogger(__name__)


class Conflict(OptschedError):
    """A request for another version of the cluster, or an id that another request had."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


class Record(msgspec.Struct, frozen=True):
    """An accepted request in a journal."""

    id: str
    digest: str
    answer: msgspec.Raw
    steps: list[list[Any]] = []

    def kept(self) -> bytes:
        """Return digest and answer: what memory keeps."""
        return self.digest.encode() + bytes(self.answer)


class First(msgspec.Struct, kw_only=True):
    """First line of a journal: the cluster from whose version it goes on."""

    format: str = FORMAT
    name: str
    time: int
    version: int = 0
    snapshot: Any
    model: Any = None
    created: Record | None = None
    """The request that created the cluster; None in journals that have a former one."""


class LiveCluster:
    """The state of a cluster, its journal, and the answers to its latest requests."""

    def __init__(self, first: First, place: str) -> None:
        found = documents.from_tree(first.snapshot, f"{place}: snapshot")
        model = BottleneckBandwidth(found.cluster)
        if first.model is not None:
            model = model_document.from_tree(first.model, f"{place}: model", found.cluster)
            found = replace(found, state=replace(found.state, cluster=model.cluster))
        self.name, self.rules, self._model_tree = first.name, Rules(model), first.model
        self.status = Status.of(found, first.version, first.time)
        self._former: dict[str, bytes] = {}
        self._recent: dict[str, bytes] = {}
        """Digests and answers of requests by id, those of the former journal apart."""
        self._journal: Journal
        self._queue: list[tuple[Change, asyncio.Future[bytes]]] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def create(cls, path: Path, request: Create) -> LiveCluster:
        """Write the journal of a new cluster."""
        record = Record(request.id, _digest(request), msgspec.Raw(b'{"version":0}'))
        name, now = path.name.removesuffix(SUFFIX), int(time.time())
        first = First(
            name=name, time=now, snapshot=request.snapshot, model=request.model, created=record
        )
        found = cls(first, "request")
        found._recent[record.id] = record.kept()
        found._journal = Journal.create(path, msgspec.json.encode(first))
        return found

    @classmethod
    def open(cls, path: Path) -> LiveCluster:
        """Read a journal and apply its changes."""
        journal, lines = Journal.open(path)
        place = f"{path}:1"
        if not lines:
            raise InputError(f"{place}: the file is empty; restore it from a copy")
        first = decode_document(parse(lines[0].decode(), place), First, FORMAT, place)
        if first.name != path.name.removesuffix(SUFFIX):
            raise InputError(f"{place}: name: is of the cluster {format_json(first.name)}")
        found = cls(first, place)
        found._journal = journal
        if first.created is None:
            found._former = {one.id: one.kept() for _, one in _records(read_former(path))}
        for number, record in _records(lines):
            with placed(f"{path}:{number}: "):
                found.status = found.status.after(record.steps) if number > 1 else found.status
            found._recent[record.id] = record.kept()
        return found

    def commit(self, requests: Sequence[Change]) -> list[bytes | Exception]:
        """Apply requests one after the other, write them to the disk, and return the answers.

        A request that is refused changes nothing, and its id stays unused. After a failed write
        all of them are refused.
        """
        status, new, records = self.status, dict[str, bytes](), list[Record]()
        answers: list[bytes | Exception] = []
        for request in requests:
            try:
                if (answer := self.known(request, new)) is None:
                    if request.version not in (None, status.version):
                        raise Conflict(
                            f"version: expected {status.version}, got {request.version}: the "
                            "cluster has changed since", status.version,
                        )  # fmt: skip
                    steps, found = request.steps(status, self.rules)
                    after = status.after(steps)
                    found = {"version": after.version, "free": len(after.state.free)} | found
                    answer = msgspec.json.encode(found)
                    record = Record(request.id, _digest(request), msgspec.Raw(answer), steps)
                    records.append(record)
                    new[request.id], status = record.kept(), after
                answers.append(answer)
            except Exception as error:
                answers.append(error)
        if new:
            try:
                self._journal.append(msgspec.json.encode(records))
            except StorageError as error:
                return [error] * len(requests)
            self.status = status
            self._recent |= new
            if len(self._recent) >= RECORDS:
                self._restart()
        return answers

    def known(self, request: Change, new: Mapping[str, bytes] = {}) -> bytes | None:
        """Return the answer to a request that was accepted before, or is among the `new` ones."""
        for kept in (new, self._recent, self._former):
            if (found := kept.get(request.id)) is not None:
                if not found.startswith(digest := _digest(request).encode()):
                    text = f"id: {request.id!r:.60} belongs to another request"
                    raise Conflict(text, self.status.version)
                return found[len(digest) :]
        return None

    def _restart(self) -> None:
        """Begin a new journal with the present state."""
        now, status = int(time.time()), self.status
        snapshot = status.snapshot(self.name)
        first = First(
            name=self.name, time=now, version=status.version, model=self._model_tree,
            snapshot=msgspec.Raw(snapshot.to_json()),
        )  # fmt: skip
        try:
            self._journal = self._journal.restart(msgspec.json.encode(first))
            self.status = Status.of(snapshot, status.version, now)
            self._former, self._recent = self._recent, {}
        except StorageError as error:
            _log.warning("%s: the journal goes on without a new start: %s", self.name, error)

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
            found = await asyncio.to_thread(self.commit, [request for request, _ in batch])
            for (_, future), answer in zip(batch, found, strict=True):
                if future.done():
                    continue  # its client is gone
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def close(self) -> None:
        """Finish what is queued and close the journal."""
        if self._task is not None:
            await self._task
        self._journal.close()


class Live:
    """The live clusters of one folder, which no other process may open meanwhile.

    Raises
    ------
    InputError
        The folder cannot be written or is in use, or a journal is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another service uses this folder; stop it first") from None
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        self.clusters = {one.name: one for one in map(LiveCluster.open, paths)}
        self._creating = asyncio.Lock()

    def get(self, name: str) -> LiveCluster:
        """Return a cluster by name."""
        if name not in self.clusters:
            known = ", ".join(self.clusters) or "none"
            raise InputError(f"cluster: no cluster {name!r:.60}; known: {known:.200}")
        return self.clusters[name]

    async def create(self, name: str, request: Create) -> bytes:
        """Create a cluster; the same request again gets the first answer."""
        async with self._creating:
            if name in self.clusters:
                if answer := self.clusters[name].known(request):
                    return answer
                version = self.clusters[name].status.version
                raise Conflict(f"cluster: there is a cluster {name!r} already", version)
            if not _NAME.fullmatch(name):
                raise InputError(
                    f"cluster: expected 1 to 64 letters, digits, '.', '_' and '-', got {name!r:.80}"
                )
            if len(self.clusters) >= MOST_CLUSTERS:
                raise InputError(f"cluster: there are {MOST_CLUSTERS} clusters already")
            path = self.folder / f"{name}{SUFFIX}"
            self.clusters[name] = await asyncio.to_thread(LiveCluster.create, path, request)
            return b'{"version":0}'

    async def close(self) -> None:
        """Close all journals."""
        for one in self.clusters.values():
            await one.close()
        self._lock.close()


def _records(lines: Sequence[bytes]) -> Iterator[tuple[int, Record]]:
    """Read the accepted requests of a journal, with the numbers of their lines."""
    if lines and (first := msgspec.json.decode(lines[0], type=First)).created is not None:
        yield 1, first.created
    for number, line in enumerate(lines[1:], 2):
        for record in msgspec.json.decode(line, type=list[Record]):
            yield number, record


def _digest(request: Change) -> str:
    """Return a hash of a request, independent of the order of its fields."""
    content = msgspec.json.encode([type(request).__name__, request], order="deterministic")
    return hashlib.blake2b(content, digest_size=12).hexdigest()
