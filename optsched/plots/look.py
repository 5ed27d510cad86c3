"""The common look of all pictures: colours of jobs, shades of kinds, readable times and names."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from optsched.io.text import one_line, share_text, time_text

if TYPE_CHECKING:
    from optsched.analysis.report import Report
    from optsched.model.schedule import Schedule

# Hues in degrees of OKLCH. Neighbours in the list are far apart on the blue-yellow axis, which
# people with a red-green deficiency see as well; the lightness differs between rounds.
_HUES = (255, 60, 165, 350, 105, 300, 28, 215, 135, 325)
_ROUNDS = (0.0, -0.055, 0.05)


class Shade(NamedTuple):
    """How a kind of operation shows: lightness in OKLCH, chroma, and a hatch (matplotlib's)."""

    lightness: float
    chroma: float
    hatch: str


_SHADES = {
    "F": Shade(0.84, 0.085, ""),
    "B": Shade(0.58, 0.135, ""),
    "": Shade(0.72, 0.115, ""),
    "R": Shade(0.84, 0.085, "////"),
    "I": Shade(0.58, 0.135, ""),
    "W": Shade(0.66, 0.125, "...."),
    "U": Shade(0.42, 0.080, ""),
    "run": Shade(0.74, 0.115, ""),
    "restart": Shade(0.50, 0.100, "////"),
}
_OTHER = (
    Shade(0.72, 0.115, "\\\\\\\\"),
    Shade(0.72, 0.115, "xxxx"),
    Shade(0.72, 0.115, "||||"),
    Shade(0.72, 0.115, "----"),
)


def shade(kind: str, other: int = 0) -> Shade:
    """Shade of a kind: F light, B dark, the rest in between or hatched.

    ``other`` numbers the kinds that are not ours, so that they differ from each other.
    """
    return _SHADES.get(kind, _OTHER[other % len(_OTHER)])


def shades(schedule: Schedule) -> dict[str, Shade]:
    """Shades of all kinds of a schedule: ours in their usual order, then the others."""
    kinds = {str(kind) for kind in schedule.kind}
    ours = [kind for kind in _SHADES if kind in kinds]
    others = sorted(kinds.difference(_SHADES))
    found = {kind: shade(kind) for kind in ours}
    return found | {kind: shade(kind, k) for k, kind in enumerate(others)}


@lru_cache(4096)
def colour(job: int, look: Shade) -> str:
    """Colour of a job in a shade, as ``#rrggbb``; colours repeat after 30 jobs."""
    hue = _HUES[job % len(_HUES)]
    lift = _ROUNDS[job // len(_HUES) % len(_ROUNDS)]
    return oklch(look.lightness + lift, look.chroma, hue)


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """An sRGB colour ``#rrggbb`` from OKLCH (B. Ottosson, A perceptual color space, 2020)."""
    a = chroma * math.cos(math.radians(hue))
    b = chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(channel)):02x}" for channel in linear)


def is_dark(rgb: str) -> bool:
    """Whether white text reads better on a colour ``#rrggbb`` than dark text."""
    red, green, blue = (int(rgb[k : k + 2], 16) for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


NEGATED = {"bandwidth": (10**6, "GB/s"), "relative bandwidth": (10**7, "%")}
"""Maximized objectives: divisor of their negated values, and the unit after it."""

IN_PARTS = {"utility": -1, "level": -1, "deviation": 1}
"""Objectives of quota plans, in parts of the plan's resolution, and their printed sign."""


def worth(summary: Report) -> list[str]:
    """Objective, bound and gap of a schedule, as parts of a headline."""
    name = one_line(summary.objective_name, 30)
    parts = [f"{name} {value_text(name, summary.objective, summary.time_unit)}"]
    if summary.lower_bound is not None:
        negative = name in NEGATED or IN_PARTS.get(name) == -1
        bound = "bound" if negative else "lower bound"
        parts.append(f"{bound} {value_text(name, summary.lower_bound, summary.time_unit)}")
    if summary.status == "optimal":
        parts.append("proved optimal")
    elif summary.gap is not None:
        parts.append(f"gap {share_text(summary.gap)}")
    return parts


def value_text(objective: str, value: int, unit: str) -> str:
    """The value of an objective with its unit; what is maximised is minimised by its negative."""
    if objective in NEGATED:
        divisor, what = NEGATED[objective]
        return f"{-value / divisor:.2f} {what}"
    if objective in IN_PARTS:
        return f"{IN_PARTS[objective] * value:,} parts".replace(",", "\u202f")
    return time_text(value, unit)


def _gamma(channel: float) -> float:
    clipped = min(max(channel, 0.0), 1.0)
    return 12.92 * clipped if clipped <= 0.0031308 else 1.055 * clipped ** (1 / 2.4) - 0.055
