"""The 162 published job shops by name, ft06 to ta80, with their best known bounds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.errors import InputError
from optsched.io.values import did_you_mean, format_value
from optsched.problems.jobshop.generator import generate
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME: Final = re.compile(r"(ft|la|abz|orb|swv|yn|ta)[0-9]+")


class _Entry(NamedTuple):
    lower: int
    upper: int
    jobs: int
    machines: int
    seeds: tuple[int, int] | None
    rows: Sequence[str]


def is_name(text: str) -> bool:
    """Whether a text is the name of a published instance and not that of a file."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def instance(name: str) -> JobShop:
    """Return a published job shop: ``ft06``, ``la01``, ``abz5``, ``orb01``, ..., ``ta80``.

    Those of Taillard are generated from their seeds.
    """
    entries = _entries()
    if name not in entries:
        hint = did_you_mean(str(name)[:20].lower(), [*entries])
        families = "ft06 to ft20, la01 to la40, abz5 to abz9, orb, swv, yn and ta01 to ta80"
        raise InputError(
            f"there is no published job shop {format_value(name)}: expected {families}{hint}"
        )
    one = entries[name]
    if one.seeds:
        shop = generate(one.jobs, one.machines, *one.seeds, name)
        bounds = {"upper_bound": one.upper, "lower_bound": one.lower}
        return JobShop(
            shop.jobs, shop.machines, name=name, time_unit=shop.time_unit,
            metadata={**shop.metadata, **bounds},
        )  # fmt: skip
    rows = [list(map(int, row.split())) for row in one.rows]
    jobs = [list(zip(row[::2], row[1::2], strict=True)) for row in rows]
    return JobShop(jobs, [f"m{k}" for k in range(one.machines)], name=name)


def bounds() -> Mapping[str, tuple[int, int]]:
    """Return the best known lower and upper bound of the makespan by name, family by family."""
    return {name: (one.lower, one.upper) for name, one in _entries().items()}


@cache
def _entries() -> dict[str, _Entry]:
    text = Path(__file__).with_name("published.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found, at = dict[str, _Entry](), 0
    while at < len(lines):
        name, *numbers = lines[at].split()
        lower, upper, jobs, machines, *seeds = map(int, numbers)
        pair = (seeds[0], seeds[1]) if seeds else None
        end = at + 1 + (jobs if pair is None else 0)
        found[name] = _Entry(lower, upper, jobs, machines, pair, lines[at + 1 : end])
        at = end
    return found
