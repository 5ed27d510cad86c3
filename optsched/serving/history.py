"""A log's document as arrays, for those who judge it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.routing import Routing
    from optsched.problems.routing.log_document import Document

NEVER = 2**62
_MOST_MS = 2**53 / 10**6
_INSTANCE = ("server", "segment", "width", "load", "ready", "unload")
_BATCH = ("server", "host", "segment", "width", "start", "end", "size")
_ENTRY = ("batch", "request", "segment", "queued")


@dataclass(frozen=True, eq=False)
class History:
    """What a document says: indices instead of names, ns instead of ms; `host` is a row."""

    problem: Routing
    said: Document
    instance: Any
    batch: Any
    entry: Any
    horizon: int

    @cached_property
    def times(self) -> Any:
        """How often each request runs each segment."""
        n, k = self.problem.n_requests, self.problem.n_segments
        at = self.entry["request"] * k + self.entry["segment"]
        return np.bincount(at, minlength=n * k).reshape(n, k)

    @cached_property
    def batch_of(self) -> Any:
        """In which batch, [request][segment]; -1: in none."""
        found = np.full((self.problem.n_requests, self.problem.n_segments), -1)
        found[self.entry["request"], self.entry["segment"]] = self.entry["batch"]
        return found

    @cached_property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Of every entry the width of its input, when that is there, and what moving it takes."""
        k, r, b = (self.entry[key] for key in ("segment", "request", "batch"))
        row = np.where(k > 0, self.batch_of[r, k - 1], -1)
        before = self.batch[np.maximum(row, 0)]
        width = np.where(row >= 0, before["width"], 0)
        exists = np.where(row >= 0, before["end"], np.where(k > 0, 0, self.problem.arrival[r]))
        moved = np.zeros(len(k))
        link = self.problem.link
        if link is not None and not self.said.wall_clock:
            took = link.latency_ms + np.asarray(link.activation_mb, np.float64) * link.ms_per_mb
            away = (row >= 0) & (before["server"] != self.batch["server"][b])
            moved[away] = took[k[away] - 1, width[away]] * 1e6
        return width, exists, moved

    # names for messages

    def server(self, s: int) -> str:
        """A server's name."""
        return f"server {self.problem.servers[s].id!r}"

    def request(self, r: int) -> str:
        """A request's name."""
        return f"request {self.problem.ids[r]!r}"

    def the_instance(self, i: int) -> str:
        """An instance and what it is."""
        row = self.instance[i]
        gone = f", unloaded at {ms(row['unload'])}" if row["unload"] < NEVER else ""
        return (
            f"instance {self.said.instances[i].id} of {self.server(row['server'])} (segment "
            f"{row['segment']}, width {row['width']}, ready at {ms(row['ready'])}{gone})"
        )

    def the_batch(self, b: int) -> str:
        """A batch and what it is."""
        row = self.batch[b]
        return (
            f"batch {b} (segment {row['segment']}, width {row['width']}, {row['size']} requests, "
            f"{ms(row['start'])} to {ms(row['end'])})"
        )


def ms(ns: float) -> str:
    """A time for messages."""
    return f"{ns / 1e6:.6f}".rstrip("0").rstrip(".") + " ms"


def read_history(problem: Routing, said: Document) -> History | list[str]:
    """The history, or sentences about names that are not there and times out of range."""
    wrong: list[str] = []
    names: dict[str, dict[Any, int]] = {
        "server": {one.id: s for s, one in enumerate(problem.servers)},
        "segment": {k: k for k in range(problem.n_segments)},
        "width": {w: w for w in range(problem.n_widths)},
        "id": {name: r for r, name in enumerate(problem.ids)},
    }

    def index(place: str, row: Any, key: str) -> int:
        name = getattr(row, key)
        if name not in names[key]:
            wrong.append(f"{place}.{key}: there is no {name!r:.60}")
        return names[key].get(name, 0)

    def ns(place: str, row: Any, key: str) -> int:
        value: float = getattr(row, key)
        if not 0 <= value <= _MOST_MS:
            wrong.append(f"{place}.{key}: expected 0 to {_MOST_MS:.0f} ms, got {value:g}")
            return 0
        return round(value * 1e6)

    of: dict[Any, int] = {}
    instances, batches, entries = [], [], []
    for i, there in enumerate(said.instances):
        place = f"instances[{i}]"
        if of.setdefault((there.server, there.id), i) != i:
            wrong.append(f"{place}.id: server {there.server!r:.60} has an instance {there.id}")
        keys = [index(place, there, key) for key in ("server", "segment", "width")]
        gone = NEVER if there.unload_ms is None else ns(place, there, "unload_ms")
        instances.append((*keys, ns(place, there, "load_ms"), ns(place, there, "ready_ms"), gone))
    for b, ran in enumerate(said.batches):
        place = f"batches[{b}]"
        host = of.get((ran.server, ran.instance), -1)
        if host < 0:
            wrong.append(f"{place}: server {ran.server!r:.60} has no instance {ran.instance}")
        s, k, w = [index(place, ran, key) for key in ("server", "segment", "width")]
        span = ns(place, ran, "start_ms"), ns(place, ran, "end_ms")
        batches.append((s, host, k, w, *span, len(ran.requests)))
        for e, one in enumerate(ran.requests):
            where = f"{place}.requests[{e}]"
            entries.append((b, index(where, one, "id"), k, ns(where, one, "queued_ms")))
    horizon = NEVER if said.horizon_ms is None else ns("log", said, "horizon_ms")
    if wrong:
        return wrong
    return History(
        problem, said, _records(instances, _INSTANCE), _records(batches, _BATCH),
        _records(entries, _ENTRY), horizon,
    )  # fmt: skip


def _records(rows: Sequence[tuple[int, ...]], names: tuple[str, ...]) -> Any:
    return np.array(rows, [(name, "i8") for name in names])
