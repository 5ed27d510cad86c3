"""Integer programs solved by HiGHS: rows ``least <= a x <= most`` and one objective."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEAR: Final = 1e-6
"""A bound this little above an integer is that integer."""

_OFF: Final = (
    "mip_allow_restart", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost",
    "mip_detect_symmetry",
)  # fmt: skip
"""Parts of HiGHS that cost two fifths of the time here, most of it where no solution exists."""

_LONGEST: Final = 1e8
"""Seconds that every type of durations holds."""


class Row(NamedTuple):
    """One linear constraint; variables are distinct."""

    variables: list[int]
    coefficients: list[int]
    least: float
    most: float

    def holds(self, values: Sequence[int]) -> bool:
        """Check the constraint in integers."""
        total = sum(a * values[v] for v, a in zip(*self[:2], strict=True))
        return self.least <= total <= self.most


def minimize(
    upper: Sequence[int], cost: Sequence[int], rows: Sequence[Row], seconds: float
) -> tuple[list[int] | None, float]:
    """Minimize ``cost x`` over integers ``0 <= x <= upper`` that satisfy all rows.

    Returns the best values found, or None; and a lower bound of the cost, infinite if it is proved
    that no values satisfy the rows. Values are rounded and checked in integers.
    """
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    if not upper:
        return ([], 0) if all(row.holds([]) for row in rows) else (None, math.inf)
    proto, n = model_pb2.ModelProto(), len(upper)  # five times as fast to fill as mathopt.Model
    proto.variables.ids.extend(range(n))
    proto.variables.lower_bounds.extend([0.0] * n)
    proto.variables.upper_bounds.extend(upper)
    proto.variables.integers.extend([True] * n)
    proto.objective.linear_coefficients.ids.extend(v for v in range(n) if cost[v])
    proto.objective.linear_coefficients.values.extend(c for c in cost if c)
    proto.linear_constraints.ids.extend(range(len(rows)))
    proto.linear_constraints.lower_bounds.extend(row.least for row in rows)
    proto.linear_constraints.upper_bounds.extend(row.most for row in rows)
    matrix = proto.linear_constraint_matrix
    for i, row in enumerate(rows):
        cells = sorted((v, a) for v, a in zip(*row[:2], strict=True) if a)
        matrix.row_ids.extend([i] * len(cells))
        matrix.column_ids.extend(v for v, _ in cells)
        matrix.coefficients.extend(a for _, a in cells)
    model = mathopt.Model.from_model_proto(proto)
    limits = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=min(max(seconds, 0.01), _LONGEST)),
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.999,  # costs are integers
    )
    for name in _OFF:
        limits.highs.bool_options[name] = False
    found = mathopt.solve(model, mathopt.SolverType.HIGHS, params=limits)
    if found.termination.reason.name.startswith("INFEASIBLE"):
        return None, math.inf
    bound = found.termination.objective_bounds.dual_bound
    bound = math.ceil(bound - _NEAR) if math.isfinite(bound) else -math.inf
    if not found.has_primal_feasible_solution():
        return None, bound
    values = [round(value) for value in found.variable_values(model.variables())]
    inside = all(0 <= value <= most for value, most in zip(values, upper, strict=True))
    if not inside or not all(row.holds(values) for row in rows):
        return None, bound
    return values, bound
