"""Shared parts of all pictures: suffixes, style, colors of policies, writing."""

from __future__ import annotations

import io
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError, MissingExtra
from optsched.io.files import write_atomic
from optsched.plots.look import oklch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES: Final = (".png", ".svg", ".pdf")
"""Legal suffixes of a picture."""

INK: Final = "#1f2430"
MUTED: Final = "#6b7280"
GRID: Final = "#e5e7eb"

_HUES: Final = (255, 45, 150, 330, 95, 200, 290, 15)
_DASHES: Final = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))

DPI: Final = 160

_METADATA: Final[dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": "optsched"},
    ".pdf": {"CreationDate": None, "ModDate": None, "Creator": "optsched", "Producer": None},
}


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a picture file; `InputError` if it is not one of `PICTURES`."""
    check_suffix(path)
    return Path(path).suffix.lower()


def check_suffix(path: str | os.PathLike[str], suffixes: tuple[str, ...] | None = None) -> None:
    """Refuse a file name that does not end in one of the suffixes, by default `PICTURES`."""
    suffixes = suffixes or PICTURES
    if Path(path).suffix.lower() not in suffixes:
        raise InputError(f"{path}: expected a file ending in {', '.join(suffixes)}")


@contextmanager
def picture_style() -> Iterator[None]:
    """Apply fixed settings of matplotlib; `MissingExtra` if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("plots", "plot") from None
    style: dict[Any, Any] = {
        "svg.hashsalt": "optsched",
        "font.family": ["DejaVu Sans"],
        "hatch.linewidth": 0.6,
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "path.simplify": False,
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a matplotlibrc of the user must not change the picture
        matplotlib.rcParams.update(style)
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def rendered(figure: Figure, suffix: str) -> bytes:
    """Render the file content, without dates or versions that change from day to day."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=DPI, metadata=_METADATA[suffix])
    return stream.getvalue()


def look_of(k: int) -> dict[str, Any]:
    """Return color and dash of the k-th policy."""
    return {
        "color": oklch(0.58, 0.15, _HUES[k % len(_HUES)]),
        "ls": _DASHES[k // len(_HUES) % len(_DASHES)],
    }


def dress(axes: Axes, title: str) -> None:
    """Set a title at the left and a grid; remove the frame."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(True, which="major", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, labelcolor=MUTED, color=MUTED, which="both")
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Make an empty white figure of this size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def picture(draw: Callable[[], Figure], path: str | os.PathLike[str] | None) -> Figure:
    """Draw a figure in the common style; also write it if there is a path."""
    suffix = None if path is None else suffix_of(path)
    with picture_style():
        figure = draw()
        content = None if suffix is None else rendered(figure, suffix)
    if path is not None and content is not None:
        write_atomic(path, content)
    return figure
