"""What pictures of several policies share: a colour and dash for each, quiet axes, writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.io.files import write_atomic
from optsched.plots.look import oklch
from optsched.plots.picture import GRID, INK, MUTED, picture_style, rendered, suffix_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HUES = (255, 45, 150, 330, 95, 200, 290, 15)
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def look_of(k: int) -> dict[str, Any]:
    """Colour and dash of the k-th policy."""
    return {
        "color": oklch(0.58, 0.15, _HUES[k % len(_HUES)]),
        "ls": _DASHES[k // len(_HUES) % len(_DASHES)],
    }


def dress(axes: Axes, title: str) -> None:
    """A title at the left, a grid, no frame."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(True, which="major", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, labelcolor=MUTED, color=MUTED, which="both")
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def picture(draw: Callable[[], Figure], path: str | os.PathLike[str] | None) -> Figure:
    """The figure, in our style; also as a file if there is a path."""
    suffix = None if path is None else suffix_of(path)
    with picture_style():
        figure = draw()
        content = None if suffix is None else rendered(figure, suffix)
    if path is not None and content is not None:
        write_atomic(path, content)
    return figure
