"""Pictures of simulations: the same bytes every time, every policy in them, nothing hidden."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import depth

from optsched import plots
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.synthetic import synthetic
from optsched.errors import InputError
from optsched.plots.policies import busy_share
from optsched.plots.simulation import simulation_report

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.cluster.results.run import Run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Two policies on one workload."""
    jobs = synthetic(80, 1.2, 2, gpus=16)
    return {name: simulate(jobs, name, Nodes(2, gpus=8)) for name in ("fifo", "sjf")}


def test_figures_without_a_file(runs: dict[str, Run]) -> None:
    """As the tutorial calls them; every policy has its line."""
    figure = plots.jct_cdf({name: run.jct for name, run in runs.items()})
    assert [line.get_label() for line in figure.axes[0].lines] == ["fifo", "sjf"]
    for line, run in zip(figure.axes[0].lines, runs.values(), strict=True):
        x, y = line.get_data()
        assert y[-1] == 1.0 and len(x) <= 81
        ticks = np.sort(run.jct)[-1] / x[-1]
        assert np.allclose(np.asarray(x[1:]) * ticks, np.sort(run.jct))
    bars = plots.jct_decomposition(runs).axes[0].patches
    assert len(bars) == 4
    assert plots.jct_decomposition({n: r.metrics for n, r in runs.items()}).axes
    assert len(plots.utilisation_over_time(runs).axes[0].patches) == 2


@pytest.mark.slow
def test_the_same_bytes(runs: dict[str, Run], tmp_path: Path) -> None:
    """Every kind of file, twice."""
    for suffix in ("html", "svg", "png", "pdf")[: depth(2, 4)]:
        for k in (1, 2):
            simulation_report(runs, tmp_path / f"{k}.{suffix}", title="<b>&")
        one = (tmp_path / f"1.{suffix}").read_bytes()
        assert one == (tmp_path / f"2.{suffix}").read_bytes()
    page = (tmp_path / "1.html").read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert not re.search(r"(src|href)=.https?:", page)


def test_busy_share(runs: dict[str, Run]) -> None:
    """Its mean over the whole time is the utilisation."""
    run = runs["fifo"]
    edges = np.linspace(int(run.workload.submit[0]), int(run.log.end.max()), 37)
    assert busy_share(run, edges).mean() == pytest.approx(run.metrics.utilisation)


def test_long_rows_are_thinned(tmp_path: Path) -> None:
    """A hundred thousand jobs make a small file with the same ends."""
    path = tmp_path / "x.svg"
    figure = plots.jct_cdf({"a": np.arange(1, 100_001)}, path)
    x, y = figure.axes[0].lines[0].get_data()
    assert len(x) <= 2001 and y[-1] == 1.0 and path.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.jct_cdf({}), "at least one policy"),
        (lambda: plots.jct_cdf({"a": []}), "no job ended"),
        (lambda: plots.jct_cdf({"a": [-1]}), "no job ended"),
        (lambda: plots.jct_cdf({"a": ["x"]}), "flat array"),
        (lambda: plots.jct_cdf({"a": [[1]]}), "flat array"),
        (lambda: plots.jct_cdf({"a": [np.nan]}), "NaN"),
        (lambda: plots.jct_cdf({"a": [1]}, "x.gif"), "x.gif"),
        (lambda: plots.jct_decomposition({}), "at least one"),
        (lambda: plots.jct_decomposition({"a": 3}), "expected a Run"),  # type: ignore[dict-item]
        (lambda: plots.utilisation_over_time({}), "at least one"),
        (lambda: simulation_report({}, "x.png"), "at least one"),
        (lambda: plots.jct_cdf([1, 2]), "jct: expected a mapping from policies"),  # type: ignore[arg-type]
        (lambda: plots.jct_decomposition([1]), "runs: expected a mapping"),  # type: ignore[arg-type]
        (lambda: plots.utilisation_over_time([1]), "runs: expected a mapping"),  # type: ignore[arg-type]
        (lambda: plots.histogram, "no attribute"),
    ],
)
def test_what_cannot_be_drawn(draw: Any, message: str) -> None:
    """One sentence."""
    with pytest.raises((InputError, AttributeError), match=message):
        draw()


def test_gantt_is_a_function(runs: dict[str, Run], tmp_path: Path) -> None:
    """A figure without a file, and the same as one."""
    figure = plots.gantt(runs["fifo"].history)
    assert len(figure.axes[0].get_yticks()) == 16
    plots.gantt(runs["fifo"].history, tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
