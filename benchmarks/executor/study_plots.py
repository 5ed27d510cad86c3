"""Plots of the ArrayPipe study: where the time goes, and what the sweeps change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.executor.study_baselines import SINGLE
from benchmarks.executor.study_cases import Case, sweeps
from benchmarks.executor.study_tables import NAMES, SOLVED, Study, shares
from optsched.plots.look import oklch
from optsched.plots.picture import MUTED, dress, look_of, picture

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "forward": oklch(0.72, 0.11, 255), "backward": oklch(0.52, 0.14, 255),
    "overhead": oklch(0.70, 0.13, 60), "bubble": "#e5e7eb",
}  # fmt: skip


def draw(study: Study, folder: Path) -> None:
    """Write ``arraypipe-time.png`` and ``arraypipe-sweeps.png``."""
    picture(lambda: time_by_method(study), folder / "arraypipe-time.png")
    picture(lambda: saved_by_sweep(study), folder / "arraypipe-sweeps.png")


def time_by_method(study: Study) -> Figure:
    """Stacked bars by model: time of one iteration of all jobs, as it is spent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), facecolor="white", layout="constrained")
    axes = figure.subplots(-(-len(study.models) // 2), 2, squeeze=False).ravel()
    for axis, model in zip(axes, study.models, strict=False):
        _bars(axis, study, model)
    for axis in axes[len(study.models) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def saved_by_sweep(study: Study) -> Figure:
    """By model: time saved against the best baseline; barrier dashed and hollow, rolling full."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), facecolor="white", layout="constrained")
    names = ("servers", "memory", "bandwidth", "stages")
    for axis, name in zip(figure.subplots(2, 2).ravel(), names, strict=True):
        _lines(axis, study, name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def _lines(axis: Axes, study: Study, name: str) -> None:
    cases = sweeps()[name]
    for k, model in enumerate(study.models):
        colour = look_of(k)["color"]
        for which, dash, inside in (("barrier", "--", "white"), ("rolling", "-", colour)):
            saved = [study.saved(case, model, which, SINGLE) for case in cases.values()]
            values = [float("nan") if value is None else 100 * value for value in saved]
            axis.plot(
                range(len(values)), values, ls="" if name == "servers" else dash, marker="o", ms=4,
                mfc=inside, lw=1.3, color=colour, label=model if which == "rolling" else None,
            )  # fmt: skip
    axis.axhline(0, color=MUTED, lw=0.8)
    axis.set_xticks(range(len(cases)), list(cases))
    axis.margins(x=0.1)
    dress(axis, f"{name}: time saved against the best pipeline, %")


def _bars(axis: Axes, study: Study, model: str) -> None:
    names = [name for name in (*SINGLE[1:], *SOLVED) if study.run(Case(""), model, name)]
    left = [0.0] * len(names)
    for part, colour in COLOURS.items():
        widths = []
        for name in names:
            run = study.run(Case(""), model, name)
            assert run is not None
            widths.append(shares(run)[part] * run.time / 1e6)
        axis.barh(range(len(names)), widths, left=left, color=colour, height=0.7, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(names)), [NAMES[name] for name in names])
    axis.invert_yaxis()
    dress(axis, f"{model}, s")
    axis.grid(False, axis="y")
