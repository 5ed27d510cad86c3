"""`rocm-smi --showtopo`: links of AMD GPUs, and tables that cannot be right."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster
from optsched.errors import InputError
from optsched.formats.nvidia_topo import from_text

if TYPE_CHECKING:
    from pathlib import Path


def output(links: list[list[str]], hops: list[list[int]], numa: list[int]) -> str:
    """The text of the program, in the order and with the widths of its tables."""
    n = range(len(links))
    heads = "".join(f"{f'GPU{i}':<13}" for i in n)

    def table(title: str, cells: list[list[str]]) -> list[str]:
        rows = [f"GPU{i:<4}" + "".join(f"{c:<13}" for c in row) for i, row in enumerate(cells)]
        return [f"{f' {title} ':=^90}", f"{'':7}{heads}", *rows, ""]

    access = [["True"] * len(n)] * len(n)
    weight = [[str(hops[i][k] * (15 if links[i][k] == "XGMI" else 20)) for k in n] for i in n]
    printed = [["1" if links[i][k] == "XGMI" else str(hops[i][k]) for k in n] for i in n]
    lines = [f"{' ROCm System Management Interface ':=^90}"]
    lines += table("Weight between two GPUs", weight)
    lines += table("Hops between two GPUs", printed)
    lines += table("Link accessibility between two GPUs", access)
    lines += table("Link Type between two GPUs", links)
    lines += [f"{' Numa Nodes ':=^90}"]
    for i, node in enumerate(numa):
        lines += [f"GPU[{i}]\t\t: (Topology) Numa {what}: {node}" for what in ("Node", "Affinity")]
    return "\n".join([*lines, f"{' End of ROCm SMI Log ':=^90}", ""])


def amd_smi(text: str) -> str:
    """The same tables as `amd-smi topology` prints them, by addresses; NUMA nodes are not in it."""
    for title, word in (
        ("Weight between two GPUs", "WEIGHT"), ("Hops between two GPUs", "HOPS"),
        ("Link accessibility between two GPUs", "ACCESS"),
        ("Link Type between two GPUs", "LINK TYPE"),
    ):  # fmt: skip
        text = re.sub(f"=+ {title} =+", f"{word} TABLE:", text)
    text = re.sub("=+ Numa(.|\n)*|=+ ROCm.*", "", text)
    text = re.sub(r"GPU(\d)", lambda found: f"0000:{int(found[1]) * 16 + 12:02x}:00.0", text)
    text = text.replace("True", "ENABLED")
    return (
        text + "\nLegend:\n SELF = Current GPU\n ENABLED / DISABLED = Link is enabled or disabled\n"
    )


RING = output(
    [["0", "XGMI", "PCIE"], ["XGMI", "0", "PCIE"], ["PCIE", "PCIE", "0"]],
    [[0, 1, 2], [1, 0, 3], [2, 3, 0]],
    [0, 0, 1],
)


def test_output(tmp_path: Path) -> None:
    """XGMI and PCIe by hops, NUMA groups; a cluster finds the reader by the content."""
    path = tmp_path / "mi300.txt"
    path.write_text("$ rocm-smi --showtopo\n" + RING)
    kind = Cluster.from_files({"mi": path}, {"n[1-2]": "mi"}, nics=8).type(0)
    assert kind.links == (("X", "NV2", "PHB"), ("NV2", "X", "SYS"), ("PHB", "SYS", "X"))
    assert (kind.numa, kind.nics) == (((0, 1), (2,)), 8)
    with pytest.warns(UserWarning, match="lists no network card: 1 is taken"):
        assert from_text(RING, "h").nics == 1


@given(st.data())
def test_any_host(data: st.DataObject) -> None:
    """Every pair is what the table of links and the one of hops say."""
    n = data.draw(st.integers(1, 9))
    pair = {
        (i, k): (data.draw(st.sampled_from(["XGMI", "PCIE"])), data.draw(st.integers(1, 4)))
        for i in range(n) for k in range(i)
    }  # fmt: skip
    at = [[("0", 0) if i == k else pair[max(i, k), min(i, k)] for k in range(n)] for i in range(n)]
    numa = [data.draw(st.integers(0, 1)) for _ in range(n)]
    kind = from_text(
        output([[c[0] for c in r] for r in at], [[c[1] for c in r] for r in at], numa), "h", nics=1
    )
    words = {"0": "X"}
    assert kind.links is not None
    for i in range(n):
        for k in range(n):
            link, hops = at[i][k]
            near, far = ("NV2", "NV1") if link == "XGMI" else ("PHB", "SYS")
            word = words.get(link) or (near if hops <= (1 if link == "XGMI" else 2) else far)
            assert kind.links[i][k] == word
    groups = {i: group for group in kind.numa for i in group}
    assert all((groups[i] == groups[k]) == (numa[i] == numa[k]) for i in range(n) for k in range(n))
    other = amd_smi(output([[c[0] for c in r] for r in at], [[c[1] for c in r] for r in at], numa))
    assert from_text(other, "h", nics=1) == replace(kind, numa=())


TABLES = re.split("(?<=\n)(?==)", RING)  # the title, then one each


def without(*words: str) -> str:
    """The output without some tables."""
    return "".join(part for part in TABLES if not any(word in part for word in words))


BAD = {
    "unknown link": (RING.replace("XGMI", "FOO"), "f:22: row GPU0, column GPU1: .* got 'FOO'"),
    "cut off": (RING[: RING.rindex("PCIE         PCIE") + 8], "f:24: row GPU2, column GPU1: th"),
    "hops lost": (RING.replace("GPU2   2 ", "xGPU   2 "), "f:24: row GPU2, column GPU0: expec"),
    "direction": (RING.replace("GPU1   XGMI", "GPU1   PCIE"), "f:22: row GPU0, column GPU1: NV2,"),
    "weight": (RING.replace("GPU1   15 ", "GPU1   17 "), "f:23: .* GPU0: expected a weight .*'17'"),
    "no weights": (without("Weight"), "f:16: row GPU0, column GPU1: .*no table of weight: print"),
    "weights alone": (without("Hops", "Link"), "f: has no table of link types: expected all of"),
    "two hosts": (RING + RING, "f:35: the table of weight is there twice"),
    "amd json": ('[{"gpu": 0, "links": [{"gpu": 1, "link_type": "XGMI", "num_hops": 1}]}]',
                 "f: expected tables: print the topology without --json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    """Each fault is found, and named with line, row and column."""
    text, message = BAD[case]
    with pytest.raises(InputError, match=message):
        from_text(text, "h", "f", nics=1)
