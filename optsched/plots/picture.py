"""What all picture files share: suffixes, a style of our own, and bytes that do not change."""

from __future__ import annotations

import io
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from matplotlib.figure import Figure

PICTURES: Final = (".png", ".svg", ".pdf")
"""Legal suffixes of a picture."""

INK: Final = "#1f2430"
MUTED: Final = "#6b7280"
GRID: Final = "#e5e7eb"

DPI: Final = 160

_METADATA: Final[dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": "optsched"},
    ".pdf": {"CreationDate": None, "ModDate": None, "Creator": "optsched", "Producer": None},
}


def suffix_of(path: str | os.PathLike[str]) -> str:
    """The suffix of a picture file; `InputError` if it is none of `PICTURES`."""
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        raise InputError(f"{path}: expected a picture file ending in {', '.join(PICTURES)}")
    return suffix


@contextmanager
def picture_style() -> Iterator[None]:
    """Our settings of matplotlib, and nobody else's; `MissingExtra` without matplotlib."""
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
    """The file content, without dates or versions that would change from day to day."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=DPI, metadata=_METADATA[suffix])
    return stream.getvalue()
