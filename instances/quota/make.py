"""Make the quota plans of this folder.

python make.py            # rewrite the *.json files beside this script
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.problems.quota.synthetic import synthetic

if TYPE_CHECKING:
    import optsched

HERE = Path(__file__).parent
SEED = 5

CASES: dict[str, dict[str, Any]] = {
    "sum-20": {"jobs": 20, "nodes": 4},
    "sum-100": {"jobs": 100, "nodes": 16},
    "sum-all-sizes-40": {"jobs": 40, "nodes": 8, "gaps": False},
    "max-min-30": {"jobs": 30, "nodes": 8, "objective": "max_min"},
    "proportional-40": {"jobs": 40, "nodes": 16, "objective": "proportional"},
    "makespan-30": {"jobs": 30, "nodes": 8, "objective": "makespan"},
    "two-types-12": {"jobs": 12, "nodes": 6, "gpus": 4, "types": 2},
    "two-types-makespan-8": {
        "jobs": 8, "nodes": 4, "gpus": 4, "types": 2, "objective": "makespan",
    },
    "single-12": {"jobs": 12, "nodes": 5, "gpus": 4, "locality": "single"},
    "whole-12": {"jobs": 12, "nodes": 5, "gpus": 4, "locality": "whole"},
}  # fmt: skip


def plans() -> list[optsched.QuotaPlan]:
    """All of them."""
    return [synthetic(seed=SEED, name=name, **fields) for name, fields in CASES.items()]


def main() -> None:
    """Write the files."""
    for plan in plans():
        plan.write(HERE / f"{plan.name}.quota.json")


if __name__ == "__main__":
    main()
