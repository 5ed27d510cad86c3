"""BPipe: 1F1B that parks activations of the first stages on the last ones."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer
from optsched.model.graph import scheduled
from optsched.model.schedule import Arcs, Resource, Rows, Schedule
from optsched.pipelines.fixed_order import (
    Step,
    blocks,
    fixed,
    numbered,
    one_stage_a_device,
    operations,
    units,
)
from optsched.pipelines.orders import steps_ahead
from optsched.problems.jobarray.checks import MAX_BLOCKS

if TYPE_CHECKING:
    from optsched.problems.jobarray.problem import JobArray


class _Copy(NamedTuple):
    """An activation that leaves a stage before the step numbered `leaves`, and comes back."""

    unit: int
    stage: int
    leaves: int
    returns: int


def bpipe(job: JobArray, *, copy_time: int = 0) -> Schedule:
    """1F1B whose stage s < S/2 parks activations on device S-1-s (Kim et al. 2023).

    Stages that park keep at most ceil((S + 2) / 2) activations, instead of S. So do those that
    take some in if stages are equal, copies take no time, and b = f or b = 2f (checked for
    S <= 16). At other ratios (f = 2, b = 5, S = 6, m = 8), or with copies of up to half a block,
    they may hold one more: a device takes and gives back between its blocks only.

    The schedule's graph is that of the job with more operations. On a link between the two devices
    ``evict`` and ``load`` copy an activation; without duration, on the devices, ``acquire`` takes
    the bytes on the side that a copy goes to before it starts, ``free`` gives them back on the
    other side after its end. An activation leaves while the block before the one that needs its
    room runs, and comes back while the block before its backward pass runs: copies of half a
    block's time cost nothing.

    `copy_time` is the time of one copy over a link; a link copies one after the other. A job with
    ``objective="period"`` is refused: copies belong to one iteration.
    """
    stages = one_stage_a_device(job, "bpipe")
    integer("copy_time", copy_time, 0, MAX_INTEGER // MAX_BLOCKS)
    if job.objective == "period":
        raise InputError('bpipe: orders one iteration, take objective="makespan"')
    steps = steps_ahead(range(stages, 0, -1), len(units(job)))
    plain = fixed(job, "bpipe", steps)
    copies = [copy for v in range(stages // 2) for copy in _copies(steps[v], v, stages)]
    if not copies:
        return plain
    return _Parking(job, plain, steps, copy_time).schedule(copies)


def _copies(row: list[Step], v: int, stages: int) -> list[_Copy]:
    """What leaves and returns so that at most ceil((S + 2) / 2) activations are there."""
    room = (stages + 3) // 2
    here: dict[int, int] = {}  # micro-batch -> the step after its forward block
    away: dict[int, int] = {}  # micro-batch -> the step before which it leaves
    found = []
    for t, step in enumerate(row):
        following = row[t + 1] if t + 1 < len(row) else step
        back = following.unit if following.kind == "B" and following.unit in away else None
        need = (step.kind == "F") + (back is not None)
        if len(here) + need > room:
            # the one needed last of those that are complete when the step before begins
            leaver = max(k for k, complete in here.items() if complete < t)
            del here[leaver]
            away[leaver] = t
        if back is not None:
            found.append(_Copy(back, v, away.pop(back), t))
            here[back] = t
        if step.kind == "F":
            here[step.unit] = t + 1
        else:
            del here[step.unit]
    return found


class _Parking:
    """Adds copies to the graph and the orders of 1F1B."""

    def __init__(
        self, job: JobArray, plain: Schedule, steps: list[list[Step]], copy_time: int
    ) -> None:
        self.plain, self.steps, self.copy_time = plain, steps, copy_time
        self.units, self.number = units(job), numbered(plain)
        self.rows = operations(job, plain, steps)
        assert plain.start is not None
        self.start = plain.start.tolist()
        self.end = plain.end.tolist()
        self.begins = [[self.start[i] for i in row] for row in self.rows]
        self.added: list[dict[str, Any]] = []
        self.arcs: list[tuple[int, int]] = []
        # (position in the device's row, time, step, takes, operation) of what goes before it
        self.between: list[list[tuple[int, int, int, bool, int]]] = [[] for _ in self.rows]
        self.links: dict[int, list[tuple[int, int, int]]] = {}

    def schedule(self, copies: list[_Copy]) -> Schedule:
        """The longest path of the orders with the copies in between."""
        for copy in copies:
            self._add(copy)
        plain, stages = self.plain, len(self.steps)
        names = [resource.name for resource in plain.resources]
        links = [Resource(f"{names[v]}-{names[stages - 1 - v]}") for v in self.links]
        rows = [self._merged(d) for d in range(len(self.rows))]
        rows += [[i for *_, i in sorted(link)] for link in self.links.values()]
        place = {v: plain.n_resources + k for k, v in enumerate(self.links)}
        held = [[row["resource"] if row["resource"] >= 0 else place[row["stage"]]]
                for row in self.added]  # fmt: skip
        arcs = zip(*(column.tolist() for column in plain.arcs), strict=True)
        columns: dict[str, Any] = {
            key: np.concatenate([getattr(plain, key), [row.get(key, 0) for row in self.added]])
            for key in ("duration", "job", "stage", "microbatch", "family", "release", "setup_in",
                        "setup_out", "acquire", "free", "workspace")
        }  # fmt: skip
        graph = Schedule(
            name=plain.name,
            time_unit=plain.time_unit,
            resources=(*plain.resources, *links),
            op_resources=Rows.of([*plain.op_resources.to_lists(), *held]),
            arcs=Arcs.of([*arcs, *((i, j, 0, 0) for i, j in self.arcs)]),
            kind=np.concatenate([plain.kind, [row["kind"] for row in self.added]]),
            **columns,
        )
        return scheduled(graph, Rows.of(rows), plain.provenance)

    def _add(self, copy: _Copy) -> None:
        v, other = copy.stage, len(self.steps) - 1 - copy.stage
        unit = self.units[copy.unit]
        forward = self.number["F", *unit, v]
        backward = next(self.number[b] for b in blocks(Step("B", copy.unit, v), unit)
                        if b in self.number)  # fmt: skip
        labels = {"job": unit.job, "stage": v, "microbatch": unit.microbatch}
        size = int(self.plain.acquire[forward])
        row = self.begins[v]
        away, back = self._position(copy, copy.leaves), self._position(copy, copy.returns)
        # there: before the copy, and if possible without delaying it or the other device's block
        begin, until = row[self._position(copy, copy.leaves - 1)], row[away]
        hold = self._operation("acquire", other, acquire=size, **labels)
        self._put(hold, other, self._before_copy(other, begin, until), begin, copy.leaves - 1)
        evict = self._operation("evict", -1, duration=self.copy_time, **labels)
        dropped = self._operation("free", v, free=size, **labels)
        self._put(dropped, v, away, until, copy.leaves)
        taken = self._operation("acquire", v, acquire=size, **labels)
        self._put(taken, v, back, row[back], copy.returns)
        load = self._operation("load", -1, duration=self.copy_time, **labels)
        left = self._operation("free", other, free=size, **labels)
        after = row[back] + self.copy_time
        self._put(left, other, bisect_left(self.begins[other], after), after, copy.returns)
        link = self.links.setdefault(v, [])
        link += [(copy.leaves - 1, 1, evict), (copy.returns, 0, load)]
        self.arcs += [(forward, evict), (hold, evict), (evict, dropped), (evict, load),
                      (taken, load), (load, left), (load, backward)]  # fmt: skip

    def _position(self, copy: _Copy, step: int) -> int:
        """Place in the stage's row of the first operation of one of its steps."""
        at = self.steps[copy.stage][step]
        first = next(self.number[b] for b in blocks(at, self.units[at.unit]) if b in self.number)
        return self.rows[copy.stage].index(first)

    def _before_copy(self, device: int, begin: int, until: int) -> int:
        """Position on a device where room is taken for a copy that runs from begin to until."""
        position = bisect_left(self.begins[device], begin)
        running = self.rows[device][position - 1] if position else None
        if running is not None and begin < self.end[running] > until - self.copy_time:
            return position - 1
        return position

    def _operation(self, kind: str, resource: int, **fields: Any) -> int:
        self.added.append({"kind": kind, "resource": resource, **fields})
        return self.plain.n_operations + len(self.added) - 1

    def _put(self, operation: int, device: int, position: int, time: int, step: int) -> None:
        """Before a position of a device's row; part of the job there, so that it has no setup.

        At one position in order of time, of steps of the stage that copies (blocks may take no
        time), and giving bytes back before taking some.
        """
        row = self.rows[device]
        near = row[min(position, len(row) - 1)]
        mine = self.added[operation - self.plain.n_operations]
        for key in ("family", "setup_in", "setup_out"):
            mine[key] = int(getattr(self.plain, key)[near])
        takes = mine["kind"] == "acquire"
        self.between[device].append((position, time, step, takes, operation))

    def _merged(self, device: int) -> list[int]:
        row, merged = self.rows[device], []
        waiting = sorted(self.between[device], reverse=True)
        for position in range(len(row) + 1):
            while waiting and waiting[-1][0] == position:
                merged.append(waiting.pop()[-1])
            merged += row[position : position + 1]
        return merged
