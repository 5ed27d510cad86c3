"""Factors, uplinks, rails and NVLink cliques of a cluster: given, imported, kept, printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.domain_trees import uplink_rates
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.rates import KILOBYTES, MOST
from optsched.errors import InputError

if TYPE_CHECKING:
    from program import Cli


def leaves(sizes: list[int], rates: list[float]) -> Cluster:
    """Leaves of so many hosts, each of a type with one card of this rate."""
    kinds = tuple(HostType(f"k{i}", 2, nics=2, nic_rate=rate) for i, rate in enumerate(rates))
    hosts = [
        Host(f"n{leaf}-{i}", kinds[leaf].name, ("s", f"l{leaf}"))
        for leaf, size in enumerate(sizes)
        for i in range(size)
    ]
    return Cluster(tuple(hosts), kinds, ("spine", "leaf"))


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([12.5, 25.0, 50.0])), min_size=1,
                max_size=4), st.sampled_from([1.0, 1.5, 2.0, 4.0]))  # fmt: skip
def test_oversubscription(parts: list[tuple[int, float]], over: float) -> None:
    """The least of a level's domains counts; as GB/s it says the same."""
    cluster = leaves([size for size, _ in parts], [rate for _, rate in parts])
    bring = [size * 2 * rate for size, rate in parts]
    found = uplink_rates(cluster, {"leaf": f"{over:g}:1", "spine": f"{over:g}:1"})
    assert found == {"leaf": min(bring) / over, "spine": sum(bring) / over}
    assert uplink_rates(cluster, {"leaf": f"{found['leaf']:.6f}"})["leaf"] == pytest.approx(
        found["leaf"]
    )
    same = Cluster(cluster.hosts, cluster.types, cluster.levels, uplinks=found, factors={"leaf": 1})
    levels = same.network_levels
    rates = [MOST, *(min(MOST, round(found[key] * KILOBYTES)) for key in ("leaf", "spine"))]
    assert levels.uplink.tolist() == np.minimum.accumulate(rates).tolist()
    assert (levels.factor == WHOLE).all()


BAD: list[tuple[dict[str, str | float], str]] = [
    ({"rack": "2:1"}, r"uplinks\[rack\]: expected one of the levels spine, leaf"),
    ({"host": "2:1"}, r"uplinks\[host\]: expected one of the levels"),
    ({"leaf": "2:3"}, r"uplinks\[leaf\]: expected 2:1, or GB/s such as 400, got '2:3'"),
    ({"leaf": "-4"}, r"uplinks\[leaf\]: expected 2:1, or GB/s"),
    ({"leaf": "0.5:1"}, r"uplinks\[leaf\]: expected an oversubscription \(o:1\) >= 1, got 0.5"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(BAD)))
def test_uplinks_refused(at: int) -> None:
    """With the level and the value; unknown rates with the way out."""
    bad, message = BAD[at]
    with pytest.raises(InputError, match=message):
        uplink_rates(leaves([2, 2], [25.0, 50.0]), bad)
    kind = HostType("h", 2)
    unknown = Cluster((Host("a", "h", ("l",)), Host("b", "h", ("m",))), (kind,), ("leaf",))
    with pytest.raises(InputError, match=r"unknown for host type h: give it \(--nic-rate, nic_ra"):
        uplink_rates(unknown, {"leaf": "2:1"})
    assert uplink_rates(unknown, {"leaf": 9000.0}) == {"leaf": 9000.0}  # above any card: no limit


def test_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors and uplinks go into the document, and are printed by `show` and `check`."""
    monkeypatch.setenv("COLUMNS", "160")
    Path("topo.txt").write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n")
    Path("t.conf").write_text(
        "SwitchName=s0 Nodes=n[1-2]\nSwitchName=s1 Nodes=n[3-4]\nSwitchName=t Switches=s[0-1]\n"
    )
    words = ("topology", "import", "--topo", "h=topo.txt", "--hosts", "n[1-4]=h", "--domains",
             "t.conf", "--nics", 2, "--nic-rate", 50, "-o", "c.json")  # fmt: skip
    cli(*words, "--uplink", "leaf=2:1", "--factor", "spine=0.8", "--factor", "leaf=0.9")
    cluster = Cluster.read("c.json")
    assert cluster.factors == {"spine": 0.8, "leaf": 0.9} and cluster.uplinks == {"leaf": 100.0}
    bare = Cluster(cluster.hosts, cluster.types, cluster.levels)
    assert bare != cluster and bare.sha256 != cluster.sha256
    assert cluster == Cluster.from_files(
        {"h": "topo.txt"}, {"n[1-4]": "h"}, domains="t.conf", nics=2, nic_rate=50.0,
        factors={"spine": 0.8, "leaf": 0.9}, uplinks={"leaf": "2:1"},
    )  # fmt: skip
    rows = [line.split() for line in cli("topology", "show", "c.json").out.splitlines()]
    assert ["spine", "t", "4", "8", "0.8"] in rows
    assert ["leaf", "s0", "2", "4", "0.9", "100", "GB/s"] in rows and ["s1", "2", "4"] in rows
    notes = cli("topology", "check", "c.json").out
    assert "leaf: uplinks of 100 GB/s a domain do not limit a single job" in notes
    assert "jobs that share uplinks are not modelled" in notes and "spine: factor 0.8" in notes
    assert "factors[leaf]: expected a share" in cli.refused(*words, "--factor", "leaf=1/2")
