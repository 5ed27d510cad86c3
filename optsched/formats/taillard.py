"""The two text layouts of Taillard's job shops.

E. Taillard, Benchmarks for basic scheduling problems, EJOR 64 (1993) 278-285.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.formats.registry import Reader
from optsched.formats.standard import ShopText, layout, marked, refuse_windows
from optsched.io.values import format_value
from optsched.problems.jobshop.document import shop_of

if TYPE_CHECKING:
    from optsched.problems.jobshop.problem import JobShop

TITLE: Final = (
    "nb of jobs", "nb of machines", "time seed", "machine seed", "upper bound", "lower bound",
)  # fmt: skip
_FACTS: Final = ("time_seed", "machine_seed", "upper_bound", "lower_bound")


def from_text(text: str, name: str) -> JobShop:
    """Read one instance; machines are numbered from 1 in both layouts.

    Long layout: a title line of six names, six integers, ``Times``, n rows of m, ``Machines``, n
    rows of m; its seeds and bounds become `JobShop.metadata`. Short layout: ``n m``, then n rows
    of m durations and n rows of m machines.
    """
    lines = ShopText(text, name)
    facts: dict[str, int] | None = None
    titled = lines.line[0].isalpha()
    if titled:
        n, m, facts = _title(lines)
    else:
        n, m = lines.sizes()

    def wide(values: list[int], what: str) -> list[int]:
        if len(values) != m:
            lines.fail(f"expected {m} {what}, one a machine, got {len(values)}")
        return values

    def durations(values: list[int]) -> list[int]:
        lines.check_durations(wide(values, "durations"))
        return values

    def machines(values: list[int]) -> list[int]:
        lines.check_machines(wide(values, "machines"), 1, m, once=True)
        return [k - 1 for k in values]

    rows = []
    for title, row in (("Times", durations), ("Machines", machines)):
        if titled and lines.line.lower() != title.lower():
            got = format_value(lines.line) if lines.line else "the end of the file"
            lines.fail(f'expected the line "{title}", got {got}')
        lines.at += titled
        rows.append(lines.rows(n, row.__name__, row))
    jobs = [list(zip(k, p, strict=True)) for p, k in zip(*rows, strict=True)]
    return lines.shop(jobs, m, facts)


def to_text(shop: JobShop) -> str:
    r"""Return the long layout if the metadata have both seeds and bounds, else the short one.

    Raises
    ------
    InputError
        The shop has windows, weights or due dates, or a job does not visit every machine once.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> from optsched.formats import taillard
    >>> taillard.to_text(shop)  # durations, then machines from 1
    '2 2\n3 2\n4 1\n1 2\n2 1\n'
    """
    refuse_windows(shop, "taillard")
    if not shop.visits_every_machine_once:
        raise InputError(
            "the taillard format needs every job to visit every machine once: write it as json"
        )
    size = (shop.n_jobs, shop.n_machines)
    times = [" ".join(map(str, row)) for row in shop.duration.reshape(size).tolist()]
    places = [" ".join(map(str, row)) for row in (shop.machine.reshape(size) + 1).tolist()]
    facts = [shop.metadata.get(key) for key in _FACTS]
    if all(type(fact) is int and fact >= 0 for fact in facts):
        title = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound"
        head = [title, " ".join(map(str, (*size, *facts))), "Times"]
        rows = [*head, *times, "Machines", *places]
    else:
        rows = [f"{size[0]} {size[1]}", *times, *places]
    return marked("\n".join(rows) + "\n")


def _title(lines: ShopText) -> tuple[int, int, dict[str, int]]:
    names = tuple(" ".join(part.lower().split()) for part in lines.line.split(","))
    if names != TITLE:
        other = names[0] == "number of jobs"
        known = "; this looks like a flow shop or an open shop, which are not supported" * other
        title = ", ".join(TITLE)
        lines.fail(f'expected the title "{title}", got {format_value(lines.line)}{known}')
    lines.at += 1
    if not lines.line:
        lines.fail("expected six numbers after the title, got nothing")
    values = lines.numbers()
    if len(values) != 6:
        lines.fail(f"expected six numbers ({', '.join(TITLE)}), got {len(values)}")
    for what, value, low in zip(TITLE, values, (1, 1, 0, 0, 0, 0), strict=True):
        if value < low:
            lines.fail(f"{what}: expected an integer >= {low}, got {value}")
    lines.at += 1
    return values[0], values[1], dict(zip(_FACTS, values[2:], strict=True))


READER = Reader(
    "taillard",
    recognises=lambda source: layout(source) == "taillard",
    read=lambda source: from_text(source.text, source.file),
    write=lambda problem: to_text(shop_of(problem)),
)
