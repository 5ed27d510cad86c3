"""Log of a simulated or real run: instances, batches, their requests, and a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, decode_document, lines, read_json, rows
from optsched.io.values import integer
from optsched.model.schedule import Arcs, Csr, Resource, Schedule
from optsched.serving.tables import NS_PER_MS, fields, milliseconds

if TYPE_CHECKING:
    import os

    import pandas

    from optsched.model.schedule import IntArray
    from optsched.serving.scenario import Scenario
    from optsched.serving.tables import FloatArray


BATCH: Final = fields("server instance segment width start end images first")
"""A batch, times in ns; its requests are ``entries[first:first + images]``."""

ENTRY: Final = fields("request queued")
SHED: Final = fields("request at")
INSTANCE: Final = fields("server id segment width load ready unload")
"""An instance; `unload` is -1 for those resident at the end."""


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """Totals of a run; None where no request was completed.

    Latencies are in ms, percentiles by nearest rank; energy is that of all servers from 0 to the
    end, `dynamic_energy_j` without idle power; `gpu_variance` is the variance over servers of
    min(U, 1), its mean and standard deviation over time. Of the requests with a deadline,
    `attainment` is the percentage answered in time; `shed` were dropped, `late` answered after it.

    Examples
    --------
    >>> from optsched import serving
    >>> summary = serving.simulate(serving.reference(rate=500, seconds=0.1)).summary
    >>> summary.completed, summary.completion, summary.attainment
    (43, 1.0, None)
    """

    completed: int
    mean_ms: float | None
    sd_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    accuracy: float | None
    energy_j: float | None
    dynamic_energy_j: float | None
    gpu_variance: float
    gpu_variance_sd: float
    throughput_per_s: float | None
    completion: float | None
    decisions: int
    shed: int = 0
    late: int = 0
    attainment: float | None = None


@dataclass(frozen=True, eq=False)
class Log:
    """History of a scenario.

    Parameters
    ----------
    scenario, summary
        Servers and requests, and totals.
    batches, entries, instances, sheds
        Arrays of `BATCH`, `ENTRY`, `INSTANCE` and `SHED`.
    horizon
        Time at which the run was stopped, ns; None: all requests were completed.
    provenance
        Seed, router, plan and settings.
    wall_clock
        Whether times were measured; then durations need not follow the model.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> log = serving.simulate(scenario).log
    >>> log.batches["images"].sum() == 4 * scenario.n_requests  # segments
    np.True_
    """

    scenario: Scenario
    batches: Any
    entries: Any
    instances: Any
    sheds: Any
    summary: Summary
    horizon: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    wall_clock: bool = False

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any], scenario: Scenario) -> Log:
        """Read ``optsched.serving-log/1`` from a file or parsed JSON.

        Errors name the path in the document; a log of a different scenario is refused.
        """
        if isinstance(source, Mapping):
            return _log_of(source, "log", scenario)
        return read_json(source, _log_of, scenario)

    def to_json(self) -> bytes:
        """Return the document ``optsched.serving-log/1``."""
        from optsched.version import __version__

        names, ids = [one.id for one in self.scenario.servers], self.scenario.ids
        entries = [_Entry(ids[r], queued / NS_PER_MS) for r, queued in self.entries.tolist()]
        members: dict[str, Any] = {"format": FORMAT}
        if self.wall_clock:
            members["wall_clock"] = True
        if self.horizon is not None:
            members["horizon_ms"] = self.horizon / NS_PER_MS
        members["provenance"] = {
            "optsched": __version__, "instance_sha256": self.scenario.sha256, **self.provenance
        }  # fmt: skip
        members["summary"] = self.summary
        members["instances"] = rows(
            _Instance(names[s], i, k, w, load / NS_PER_MS, ready / NS_PER_MS,
                      None if unload < 0 else unload / NS_PER_MS)
            for s, i, k, w, load, ready, unload in self.instances.tolist()
        )  # fmt: skip
        members["batches"] = rows(
            _Batch(
                names[s], i, k, w, start / NS_PER_MS, end / NS_PER_MS, entries[first : first + n]
            )
            for s, i, k, w, start, end, n, first in self.batches.tolist()
        )
        if len(self.sheds):
            members["shed"] = rows(_Shed(ids[r], at / NS_PER_MS) for r, at in self.sheds.tolist())
        return lines(members)

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame with one row per request of a batch; times in ms."""
        from optsched.plots.notebook import requests

        return requests(self)

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import serving_view

        return serving_view(self)

    def __repr__(self) -> str:
        size = f"{len(self.batches)} batches, {self.summary.completed} requests completed"
        return f"<Log of {self.scenario.name!r:.60}: {size}>"

    def schedule(self) -> Schedule:
        """Return one operation per load and per batch, one resource per instance.

        Stage is the segment, family the width, job the row in the log; arcs lead from the batch of
        a request to its next one, and from a load to the first batch of its instance.
        """
        scenario, batches, instances = self.scenario, self.batches, self.instances
        loads = np.flatnonzero(instances["ready"] > 0)
        at = {(row["server"], row["id"]): i for i, row in enumerate(instances)}
        on = [at[row["server"], row["instance"]] for row in batches]
        resource = np.array([*loads.tolist(), *on], np.int64)
        start = np.concatenate([instances["load"][loads], batches["start"]])
        stop = np.concatenate([instances["ready"][loads], batches["end"]])
        order = np.lexsort((start, resource))
        ends = np.cumsum(np.bincount(resource, minlength=len(instances)))
        sequences = np.split(order, ends[:-1])[: len(instances)]
        first = [ops[:2].tolist() for ops in sequences if len(ops) > 1 and ops[0] < len(loads)]
        acquire = np.zeros(len(start), np.int64)
        vram = scenario.vram * 1000
        for row, ops in zip(instances, sequences, strict=True):
            acquire[ops[:1]] = vram[row["segment"], row["width"]]
        arrived = np.zeros(len(batches), np.int64)
        row = np.repeat(np.arange(len(batches)), batches["images"])
        np.maximum.at(arrived, row, scenario.arrival[self.entries["request"]])
        arrived[batches["segment"] > 0] = 0
        return Schedule(
            name=scenario.name,
            time_unit="ns",
            resources=tuple(
                Resource(f"s{s}/i{i}:k{k}w{w}", int(vram[k, w]))
                for s, i, k, w, *_ in instances.tolist()
            ),
            op_resources=Csr(np.arange(len(start) + 1), resource),
            duration=stop - start,
            arcs=Arcs.of([*first, *(self._successors(row) + len(loads)).tolist()]),
            job=np.concatenate([loads, np.arange(len(batches))]),
            stage=np.concatenate([instances["segment"][loads], batches["segment"]]),
            family=np.concatenate([instances["width"][loads], batches["width"]]),
            kind=np.array(["load"] * len(loads) + ["infer"] * len(batches), dtype=np.str_),
            release=np.concatenate([np.zeros(len(loads), np.int64), arrived]),
            acquire=acquire,
            sequences=Csr.of(ops.tolist() for ops in sequences),
            start=start,
        )

    def _successors(self, row: IntArray) -> IntArray:
        """Pairs of consecutive batches of a request; `row` is the batch of every entry."""
        order = np.lexsort((self.batches["segment"][row], self.entries["request"]))
        same = np.diff(self.entries["request"][order]) == 0
        pairs = np.stack([row[order][:-1][same], row[order][1:][same]], axis=1)
        return np.unique(pairs, axis=0)


def percentile(ascending: FloatArray, percent: int) -> float | None:
    """Return the percentile by nearest rank: the ceil(p n)-th smallest."""
    if not len(ascending):
        return None
    return float(ascending[-(-percent * len(ascending) // 100) - 1])


# documents

FORMAT: Final = "optsched.serving-log/1"


class _Struct(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a document."""


class _Instance(_Struct):
    server: int | str
    id: int
    segment: int
    width: int
    load_ms: float
    ready_ms: float
    unload_ms: float | None


class _Entry(_Struct):
    id: int | str
    queued_ms: float


class _Shed(_Struct):
    id: int | str
    at_ms: float


class _Batch(_Struct):
    server: int | str
    instance: int
    segment: int
    width: int
    start_ms: float
    end_ms: float
    requests: list[_Entry]


class _Document(_Struct, kw_only=True):
    format: str
    wall_clock: bool = False
    horizon_ms: float | None = None
    instances: list[_Instance]
    batches: list[_Batch]
    shed: list[_Shed] = []
    summary: Summary
    provenance: dict[str, Any] = {}


def _log_of(tree: Any, name: str, scenario: Scenario) -> Log:
    """Read a log from parsed JSON: indices instead of names, ns instead of ms."""
    document = decode_document(tree, _Document, FORMAT, name)
    given = document.provenance.get("instance_sha256")
    if given is not None and given != scenario.sha256:
        raise InputError(
            f"the log is of another scenario: {given!s:.12}, this one is {scenario.sha256:.12}"
        )
    names = {
        "server": {one.id: s for s, one in enumerate(scenario.servers)},
        "segment": range(scenario.n_segments), "width": range(scenario.n_widths),
    }  # fmt: skip
    requests = {"id": {name: r for r, name in enumerate(scenario.ids)}}
    instances: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, one in enumerate(document.instances):
        row = _row(f"instances[{i}]", one, names)
        if row[:2] in instances:
            raise InputError(
                f"instances[{i}].id: server {one.server!r:.60} has an instance {row[1]}"
            )
        instances[row[:2]] = row
    batches, entries = [], list[tuple[int, ...]]()
    for b, batch in enumerate(document.batches):
        row = _row(f"batches[{b}]", batch, names)
        if row[:2] not in instances:
            raise InputError(f"batches[{b}]: server {batch.server!r:.60} has no instance {row[1]}")
        batches.append((*row, len(batch.requests), len(entries)))
        place = f"batches[{b}].requests"
        entries += (_row(f"{place}[{i}]", x, requests) for i, x in enumerate(batch.requests))
    sheds = [_row(f"shed[{i}]", one, requests) for i, one in enumerate(document.shed)]
    horizon = document.horizon_ms
    return Log(
        scenario, np.array(batches, BATCH), np.array(entries, ENTRY),
        np.array([*instances.values()], INSTANCE), np.array(sheds, SHED), document.summary,
        None if horizon is None else round(milliseconds("horizon_ms", horizon) * NS_PER_MS),
        document.provenance, document.wall_clock,
    )  # fmt: skip


def _row(place: str, one: _Struct, names: Mapping[str, Any]) -> tuple[int, ...]:
    """Columns of a row: indices of names, times in ns (-1 for None), and integers."""
    found = []
    for key in one.__struct_fields__:
        value, at = getattr(one, key), f"{place}.{key}"
        if key in names:
            if value not in names[key]:
                raise InputError(f"{at}: there is no {value!r:.60}")
            found.append(int(names[key][value]))
        elif key.endswith("_ms"):
            found.append(-1 if value is None else round(milliseconds(at, value) * NS_PER_MS))
        elif key != "requests":
            found.append(integer(at, value, 0, MAX_INTEGER))
    return tuple(found)
