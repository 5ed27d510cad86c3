"""A placement plan: which instances are resident where from the beginning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import check_format, decode, parse
from optsched.io.values import integer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.problems.routing.problem import Routing

FORMAT: Final = "optsched.routing-plan/1"
SLOTS: Final = 12
"""Instances that a server holds at most."""


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
        ``"optimal"`` if the planner has proved it, by its model; else ``"feasible"``.
    objective_ms, lower_bound_ms
        Of the planner's model, ms a request, and its bound.
    accuracy
        Percent, at the planned rate.
    rate
        Requests per second that it was planned for.
    shares
        Of the tuples at that rate, by widths.
    """

    instances: tuple[tuple[int, int, int], ...]
    status: str = "feasible"
    objective_ms: float | None = None
    lower_bound_ms: float | None = None
    accuracy: float | None = None
    rate: float | None = None
    shares: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Plan:
        """A plan of your own, from rows (server, segment, width)."""
        found = []
        for i, row in enumerate(rows):
            if len(row) != 3:
                raise InputError(
                    f"instances[{i}]: expected (server, segment, width), got {row!r:.60}"
                )
            s, k, w = (integer(f"instances[{i}]", value, 0, 2**20) for value in row)
            found.append((s, k, w))
        return cls(tuple(sorted(found)))

    def check(self, problem: Routing) -> None:
        """Refuse a plan that does not fit the servers.

        Raises
        ------
        InputError
            With the server, segment or width that is not there, or what is too much.
        """
        limits = (len(problem.servers), problem.n_segments, problem.n_widths)
        for row in self.instances:
            if not isinstance(row, tuple) or len(row) != len(limits):
                raise InputError(f"plan: expected (server, segment, width), got {row!r:.60}")
            for name, value, limit in zip(("server", "segment", "width"), row, limits, strict=True):
                if not 0 <= value < limit:
                    raise InputError(
                        f"plan: {name}: expected an integer in 0..{limit - 1}, got {value}"
                    )
        for s, server in enumerate(problem.servers):
            own = [row for row in self.instances if row[0] == s]
            used = sum(int(problem.vram[k, w]) for _, k, w in own) / 1000
            if used > server.vram_mb + 5e-4:
                raise InputError(
                    f"plan: server {server.id!r} has {server.vram_mb:g} MB, its instances take "
                    f"{used:g} MB"
                )
            if len(own) > SLOTS:
                raise InputError(
                    f"plan: server {server.id!r} gets {len(own)} instances, at most {SLOTS} run"
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str], problem: Routing) -> Plan:
        """Read ``optsched.routing-plan/1``, a plan for the servers of this problem.

        Raises
        ------
        InputError
            With the path in the document, the rule and the value.
        """
        tree = parse(read_text(path), str(path))
        return cls.from_tree(tree, problem, str(path))

    @classmethod
    def from_tree(cls, tree: Any, problem: Routing, name: str) -> Plan:
        """Read a plan from parsed JSON; see `read`."""
        check_format(tree, FORMAT, name)
        found = decode(tree, _Document, name)
        number = {server.id: s for s, server in enumerate(problem.servers)}
        rows = []
        for i, row in enumerate(found.instances):
            if row.server not in number:
                raise InputError(f"{name}: instances[{i}].server: there is no {row.server!r:.60}")
            count = integer(f"{name}: instances[{i}].count", row.count, 0, SLOTS)
            rows += [(number[row.server], row.segment, row.width)] * count
        if found.status not in ("optimal", "feasible"):
            raise InputError(
                f"{name}: status: expected optimal or feasible, got {found.status!r:.60}"
            )
        named = {",".join(map(str, row)): tuple(row) for row in problem.tuples.tolist()}
        for key, value in found.shares.items():
            if key not in named or not 0 <= value <= 1 + 1e-6:
                raise InputError(
                    f"{name}: shares: expected widths of every segment and a number in 0..1, got "
                    f"{key!r:.60}: {value!r:.60}"
                )
        shares = {named[key]: value for key, value in found.shares.items()}
        plan = cls(
            tuple(sorted(rows)), found.status, found.objective_ms, found.lower_bound_ms,
            found.accuracy, found.rate, shares,
        )  # fmt: skip
        try:
            plan.check(problem)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        return plan

    def to_json(self, problem: Routing) -> bytes:
        """The document ``optsched.routing-plan/1``, for the servers of this problem."""
        rows = [
            _Instances(problem.servers[s].id, k, w, count)
            for (s, k, w), count in sorted(Counter(self.instances).items())
        ]
        shares = {",".join(map(str, row)): value for row, value in self.shares.items()}
        found = _Document(
            format=FORMAT, status=self.status, objective_ms=self.objective_ms,
            lower_bound_ms=self.lower_bound_ms, accuracy=self.accuracy, rate=self.rate,
            shares=shares, instances=rows,
        )  # fmt: skip
        return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"

    def write(self, path: str | os.PathLike[str], problem: Routing) -> None:
        """Write ``optsched.routing-plan/1``."""
        write_atomic(path, self.to_json(problem))
