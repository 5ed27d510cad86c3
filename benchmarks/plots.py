"""Draw the pictures of the pages of results.

python -m benchmarks.plots

Bars of metrics of `benchmarks/results/*.csv`, by `benchmarks/plots.toml`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from benchmarks.pages import ROOT, values

IMAGES: Final = ROOT / "docs/results/images"
COLORS: Final = ("#2f6f9f", "#e0913a", "#7a7a7a")


def main() -> None:
    """Draw all pictures."""
    mpl.rcParams.update({"svg.hashsalt": "optsched", "svg.fonttype": "none", "font.size": 9})
    IMAGES.mkdir(exist_ok=True)
    for name, plot in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        draw(plot, IMAGES / f"{name}.svg")


def draw(plot: dict[str, Any], path: Path) -> None:
    """Draw horizontal bars, a group a row and a color a metric."""
    rows: dict[str, dict[str, str]] = {}
    for of in plot["of"]:
        file, _, benchmark = of.partition("/")
        rows |= values(file)[benchmark]
    names = plot.get("rows", [*rows])
    metrics = plot["metrics"]
    thick = 0.8 / len(metrics)
    figure, axes = plt.subplots(figsize=(6.4, 0.6 + (0.14 + 0.16 * len(metrics)) * len(names)))
    for k, (metric, label) in enumerate(metrics.items()):
        places = [i + (k - (len(metrics) - 1) / 2) * thick for i in range(len(names))]
        lengths = [float(rows[name][metric]) for name in names]
        bars = axes.barh(places, lengths, thick, color=COLORS[k], label=label)
        axes.bar_label(bars, [f"{length:g}" for length in lengths], padding=2, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(plot["label"])
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    if len(metrics) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
