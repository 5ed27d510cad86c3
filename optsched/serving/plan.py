"""A placement plan: the instances that are resident on every server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import decode_document, placed, read_json
from optsched.io.values import integer, one_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.serving.scenario import Scenario

FORMAT: Final = "optsched.routing-plan/1"
SLOTS: Final = 12
"""Maximum number of instances on a server."""


class _Instances(msgspec.Struct, forbid_unknown_fields=True):
    server: int | str
    segment: int
    width: int
    count: int = 1


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    status: str = "feasible"
    objective_ms: float | None = None
    lower_bound_ms: float | None = None
    accuracy: float | None = None
    rate: float | None = None
    shares: dict[str, float] = {}
    instances: list[_Instances]


@dataclass(frozen=True)
class Plan:
    """Instances that are resident from the beginning and are never unloaded.

    Parameters
    ----------
    instances
        Rows (server, segment, width), counted from 0, in order.
    status
        ``"optimal"`` if proved in the planner's model, else ``"feasible"``.
    objective_ms, lower_bound_ms
        Objective of the planner's model, ms a request, and its bound.
    accuracy
        Percent, at the planned rate.
    rate
        Requests per second that the plan serves.
    shares
        Share of the requests at that rate, by tuple of widths, ``"0,2,3,3"``.
    """

    instances: tuple[tuple[int, int, int], ...]
    status: str = "feasible"
    objective_ms: float | None = None
    lower_bound_ms: float | None = None
    accuracy: float | None = None
    rate: float | None = None
    shares: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Plan:
        """Return a plan of rows (server, segment, width)."""
        found = []
        for i, row in enumerate(rows):
            if len(row) != 3:
                raise InputError(
                    f"instances[{i}]: expected (server, segment, width), got {row!r:.60}"
                )
            s, k, w = (integer(f"instances[{i}]", value, 0, 2**20) for value in row)
            found.append((s, k, w))
        return cls(tuple(sorted(found)))

    def check(self, scenario: Scenario) -> None:
        """Refuse a plan that does not fit the servers.

        Raises
        ------
        InputError
            With the unknown server, segment or width, or the memory or number exceeded.
        """
        limits = (len(scenario.servers), scenario.n_segments, scenario.n_widths)
        for row in self.instances:
            for name, value, limit in zip(("server", "segment", "width"), row, limits, strict=True):
                integer(f"plan: {name}", value, 0, limit - 1)
        for s, server in enumerate(scenario.servers):
            resident = [row[1:] for row in self.instances if row[0] == s]
            used = sum(int(scenario.vram[row]) for row in resident) / 1000
            if used > server.vram_mb + 5e-4:
                raise InputError(
                    f"plan: server {server.id!r} has {server.vram_mb:g} MB, its instances take "
                    f"{used:g} MB"
                )
            if len(resident) > SLOTS:
                raise InputError(
                    f"plan: server {server.id!r} gets {len(resident)} instances, at most {SLOTS} "
                    "run"
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str], scenario: Scenario) -> Plan:
        """Read ``optsched.routing-plan/1``, a plan for the servers of this scenario.

        Raises
        ------
        InputError
            With the path in the document, the rule and the value.
        """
        return read_json(path, cls.from_tree, scenario)

    @classmethod
    def from_tree(cls, tree: Any, name: str, scenario: Scenario) -> Plan:
        """Read a plan from parsed JSON; see `read`."""
        found = msgspec.structs.asdict(decode_document(tree, _Document, FORMAT, name))
        del found["format"]
        number = {server.id: s for s, server in enumerate(scenario.servers)}
        rows = []
        with placed(f"{name}: "):
            one_of("status", found["status"], ("optimal", "feasible"))
            for i, row in enumerate(found.pop("instances")):
                if row.server not in number:
                    raise InputError(f"instances[{i}].server: there is no {row.server!r:.60}")
                count = integer(f"instances[{i}].count", row.count, 0, SLOTS)
                rows += [(number[row.server], row.segment, row.width)] * count
            plan = cls(tuple(sorted(rows)), **found)
            plan.check(scenario)
        return plan

    def write(self, path: str | os.PathLike[str], scenario: Scenario) -> None:
        """Write ``optsched.routing-plan/1``, for the servers of this scenario."""
        rows = [
            _Instances(scenario.servers[s].id, k, w, count)
            for (s, k, w), count in sorted(Counter(self.instances).items())
        ]
        numbers = {key: value for key, value in vars(self).items() if key != "instances"}
        found = _Document(format=FORMAT, instances=rows, **numbers)
        write_atomic(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
