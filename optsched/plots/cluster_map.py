"""A picture of machines and their GPUs: free, held, down and chosen, by domain of the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.io.text import one_line
from optsched.plots.look import colour, shade
from optsched.plots.picture import INK, MUTED, new_figure, picture

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from matplotlib.figure import Figure

    from optsched.bandwidth.topology.state import ClusterState

_WIDE: Final = 132  # machines of a row
_CHOSEN: Final = "#d4145a"


def gpu_map(
    state: ClusterState, path: str | os.PathLike[str] | None = None, chosen: Iterable[int] = ()
) -> Figure:
    """Draw a state, also into a picture file; its suffix chooses PNG, SVG or PDF.

    A column is a machine, a cell one of its GPUs, the first at the bottom; machines of one domain
    of the lowest level stand side by side. Free cells are white, those of a job have its color,
    those down are dark; a frame marks the chosen GPUs (global numbers).

    Examples
    --------
    >>> from optsched.bandwidth import ClusterState, synthetic
    >>> state = ClusterState.idle(synthetic.cluster("nvswitch", 2))
    >>> optsched.plots.gpu_map(state, chosen=range(3)).get_suptitle()
    '16 of 16 GPUs free, 0 jobs'
    """
    cluster, marked = state.cluster, set(state.cluster.gpus(chosen))
    fill = dict.fromkeys(state.free, "white") | dict.fromkeys(state.down, INK)
    for j, job in enumerate(state.jobs):
        fill |= dict.fromkeys(job.gpus, colour(j, shade("run")))
    cells, titles, x, y, tall = [], [], 0, 0.0, 0
    for domain, machines in cluster.machine_rows().items():
        if x and x + len(machines) > _WIDE:
            x, y, tall = 0, y - tall - 2.4, 0
        titles.append((x, y + 0.3, domain))
        for i, name in enumerate(machines):
            if i and i % _WIDE == 0:
                x, y, tall = 0, y - tall - 0.8, 0
            gpus = cluster.machine(name)
            cells += [(x, y - len(gpus) + k, gpu) for k, gpu in enumerate(gpus)]
            x, tall = x + 1, max(tall, len(gpus))
        x += 1
    wide, low = max(left for left, _, _ in cells) + 1, y - tall
    title = f"{len(state.free)} of {cluster.n_gpus} GPUs free, {len(state.jobs)} jobs"

    def draw() -> Figure:
        from matplotlib.patches import Patch, Rectangle

        figure = new_figure(max(5.0, 0.13 * wide + 0.6), max(1.8, 0.13 * (2 - low) + 1.1), title)
        axes = figure.add_subplot(xlim=(-0.5, wide + 0.5), ylim=(low - 0.5, 2.0), aspect=1)
        axes.axis("off")
        for left, at, gpu in sorted(cells, key=lambda cell: cell[2] in marked):
            edge, line = (_CHOSEN, 1.4) if gpu in marked else (MUTED, 0.3)
            axes.add_patch(
                Rectangle((left + 0.06, at + 0.06), 0.88, 0.88, fc=fill[gpu], ec=edge, lw=line)
            )
        for left, at, domain in titles:
            axes.text(left, at, one_line(domain, 24), fontsize=6, color=MUTED, va="bottom")
        keys = [("free", "white", MUTED), ("down", INK, INK), ("chosen", "white", _CHOSEN)]
        keys += [(one_line(job.name, 20), fill[job.gpus[0]], MUTED) for job in state.jobs[:8]]
        patches = [Patch(fc=face, ec=edge, label=name) for name, face, edge in keys]
        figure.legend(handles=patches, loc="outside lower left", ncols=6, fontsize=6, frameon=False)
        return figure

    return picture(draw, path)
