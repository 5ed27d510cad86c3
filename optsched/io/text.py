"""Formatting of names, times, sizes and shares for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


def one_line(name: str, longest: int = 80) -> str:
    """A name from a document as one line without control characters, cut if it is long."""
    text = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in name)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def bytes_text(count: int) -> str:
    """Bytes in binary units, such as ``39.5 GiB``."""
    value, names = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(names) > 1:
        value /= 1024
        names.pop(0)
    return f"{value:.0f} {names[0]}" if names[0] == "B" else f"{value:.1f} {names[0]}"


def share_text(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


class Unit(NamedTuple):
    """A unit for times: ``number = time / ticks``."""

    name: str
    ticks: float


_LADDER = (
    ("ns", 1), ("µs", 10**3), ("ms", 10**6), ("s", 10**9),
    ("min", 60 * 10**9), ("h", 3600 * 10**9), ("days", 24 * 3600 * 10**9),
)  # fmt: skip
NANOSECONDS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


def readable_unit(time_unit: str, span: int) -> Unit:
    """The largest unit, from the given one on, in which the span is at least 5; ``""`` as it is."""
    if not time_unit:
        return Unit("", 1)
    tick = NANOSECONDS[time_unit]
    units = [unit for unit in _LADDER if unit[1] >= tick]
    name, size = [unit for unit in units if unit[1] == tick or 5 * unit[1] <= span * tick][-1]
    return Unit(name, size / tick)


def time_text(time: int, time_unit: str) -> str:
    """A time with its unit: exact up to seven digits, else four digits of a larger unit."""
    unit = Unit(time_unit.replace("us", "µs"), 1)
    digits = 0
    if time_unit and abs(time) >= 10**7:
        unit = readable_unit(time_unit, abs(time))
        digits = max(0, 4 - len(str(int(abs(time) / unit.ticks))))
    return f"{time / unit.ticks:,.{digits}f} {unit.name}".rstrip().replace(",", "\u202f")


def time_in(unit: Unit, time: int) -> str:
    """A time in a given unit; three decimals unless the unit is the tick."""
    digits = 0 if unit.ticks == 1 else 3
    return f"{time / unit.ticks:,.{digits}f} {unit.name}".rstrip().replace(",", "\u202f")


def duration(time_ns: float) -> str:
    """Three digits and a unit, such as ``1.25 ms``."""
    for name, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(time_ns) >= size * 0.9995:
            value = time_ns / size
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{time_ns:.0f} ns"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of aligned columns: the first `left` of them left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if c < left else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
