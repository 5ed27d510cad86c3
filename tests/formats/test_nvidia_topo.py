"""`nvidia-smi topo -m`: every version's layout, and cells that cannot be right."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.links import PCIE
from optsched.errors import InputError
from optsched.formats.nvidia_topo import from_text
from optsched.io.files import read_text

if TYPE_CHECKING:
    from pathlib import Path

HGX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPXB\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t56-111\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t56-111\t1\t\tN/A\n"
    "NIC0\tPXB\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tNODE\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  PIX  = Connection traversing at most a single PCIe bridge\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
NV = tuple(tuple("X" if i == k else "NV18" for k in range(4)) for i in range(4))


def test_full_output() -> None:
    """Links of GPUs, cards counted, NUMA groups, with the header underlined and legends behind."""
    kind = from_text(HGX, "h", nic_rate=25.0)
    assert (kind.gpus, kind.links, kind.numa) == (4, NV, ((0, 1), (2, 3)))
    assert (kind.nics, kind.nic_rate) == (2, 25.0)
    assert from_text(HGX, "h", nics=4).nics == 4


def test_ways_of_copying(tmp_path: Path) -> None:
    """Spaces for tabs, escape codes without ESC, CRLF, a prompt above: the same host."""
    kind = from_text(HGX, "h")
    path = tmp_path / "topo.txt"
    for text in (
        HGX.expandtabs(8),
        HGX.replace("\x1b", ""),
        HGX.replace("\n", "\r\n"),
        "$ nvidia-smi topo -m\n\n" + HGX,
        HGX[: HGX.index("\nLegend")],
        "\ufeff" + HGX,
    ):
        path.write_text(text, encoding="utf-8", newline="")
        found = from_text(read_text(path), "h")
        assert found == kind


LEGEND = (
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
    "  PIX  = Connection traversing at most a single PCIe bridge\n"
)
NVLINKS = "  NV#  = Connection traversing a bonded set of # NVLinks\n"


@pytest.mark.parametrize("link", [*PCIE, "SOC", "NV4"])
def test_nvlinks_left_out(link: str) -> None:
    """A matrix of PCIe is believed where its legend has NVLinks, or is older than they are."""
    text = f"\tGPU0\tGPU1\tNIC0\nGPU0\tX\t{link}\tPIX\nGPU1\t{link}\tX\tSYS\nNIC0\tPIX\tSYS\tX\n"
    old = LEGEND.replace("Connection traversing", "Path traverses")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = from_text(text + LEGEND + NVLINKS, "h")
        assert from_text(text + old, "h") == whole
    if link == "NV4":
        assert from_text(text + LEGEND, "h") == from_text(text, "h") == whole
        return
    for lost in (LEGEND, LEGEND[: LEGEND.index("  SYS")], LEGEND.replace("Legend:", "")):
        with pytest.raises(
            InputError, match=r"^f: expected `nvidia-smi topo -m` .*looks like .*-mp"
        ):
            from_text(text + lost, "h", "f")
    with pytest.warns(UserWarning, match=r"f: has neither an NVLink nor a legend: .*topo -m`"):
        assert from_text(text, "h", "f") == whole


@given(st.data())
def test_any_matrix(data: st.DataObject) -> None:
    """What is printed is what is read, whatever the links, cards and separators."""
    n, cards = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
    names = [f"GPU{i}" for i in range(n)] + [f"NIC{i}" for i in range(cards)]
    words = st.sampled_from((*PCIE, "NV1", "NV4", "NV18"))
    ways = {(i, k): data.draw(words) for i in range(n + cards) for k in range(i)}
    rows = [
        [" X " if i == k else ways[max(i, k), min(i, k)] for k in range(n + cards)]
        for i in range(n + cards)
    ]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    node = [data.draw(st.integers(0, 2)) for _ in range(n)]
    for i, row in enumerate(rows):
        end = [f"{8 * node[i]}-{8 * node[i] + 7}", str(node[i])] if i < n else ["", ""]
        lines.append("\t".join([names[i], *row, *end]))
    text = "\n".join(lines)
    kind = from_text(text.expandtabs(8) if data.draw(st.booleans()) else text, "h")
    assert kind.links == tuple(tuple(cell.strip() for cell in row[:n]) for row in rows[:n])
    near = {c for c in range(cards) if {rows[n + c][g].strip() for g in range(n)} & {"PIX", "PXB"}}
    kept = [c for c in range(cards) if c in near or not near]
    ports = [
        c for c in kept if "PIX" not in rows[n + c][:n]
        and any(rows[n + c][n + other] == "PIX" for other in kept if other < c)
    ]  # fmt: skip
    assert kind.nics == max(len(kept) - len(ports), 1)
    groups = {i: group for group in kind.numa for i in group}
    assert all((groups[i] == groups[k]) == (node[i] == node[k]) for i in range(n) for k in range(n))


def dgx(names: list[str]) -> str:
    """A DGX A100: two GPUs and two cards a switch; two more cards with two ports for storage."""
    devices = [f"GPU{i}" for i in range(8)] + names
    switch = [i // 2 for i in range(8)] + [0, 0, 1, 1, 4, 4, 2, 2, 3, 3, 5, 5]

    def link(i: int, k: int) -> str:
        ways = [(i == k, " X "), (max(i, k) < 8, "NV12"), (switch[i] != switch[k], "SYS")]
        word = next((word for holds, word in ways if holds), None)
        return word or ("PIX" if switch[i] > 3 else "PXB")

    lines = ["\t" + "\t".join([*devices, "CPU Affinity", "NUMA Affinity"])]
    for i, name in enumerate(devices):
        lines.append("\t".join([name, *(link(i, k) for k in range(20)), "", ""]))
    legend = [f"  NIC{i}: mlx5_{i}" for i in range(12)]
    return "\n".join([*lines, "", "NIC Legend:", "", *legend, ""])


@pytest.mark.parametrize("word", ["mlx5_", "NIC"])
def test_cards_of_a_dgx(word: str, tmp_path: Path) -> None:
    """Twelve devices, eight cards: those of storage are named in a warning, and can be chosen."""
    text = dgx([f"{word}{i}" for i in range(12)])
    left_out = "mlx5_4, mlx5_5, mlx5_10, mlx5_11"
    with pytest.warns(UserWarning, match=f"f: 8 of 12 network devices count; left out: {left_out}"):
        kind = from_text(text, "h", "f")
    assert kind.nics == 8
    assert from_text(text, "h", nics=["mlx5_3"]).nics == 1
    Cluster.uniform(kind, 1).write(tmp_path / "c.json")
    assert Cluster.read(tmp_path / "c.json").types == (kind,)
    assert from_text(text, "h", nics=12).nics == 12
    assert from_text(text, "h", nics=[f"{word}{i}" for i in range(4)]).nics == 4
    if word == "NIC":
        assert from_text(text, "h", nics=["mlx5_0", "NIC11"]).nics == 2
    for wrong in (["mlx5_12"], ["mlx5_0", "mlx5_0"], "mlx5_0"):
        with pytest.raises(InputError, match="f: nics: expected a number, or names of cards"):
            from_text(text, "h", "f", nics=wrong)


BAD = {
    "no header": (HGX.partition("\n")[2], "f:1: the header with the names"),
    "unknown link": (HGX.replace("\tPXB\tSYS\t0", "\tFOO\tSYS\t0"),
                     "f:2: row GPU0, column NIC0: expected one of SYS, .*got 'FOO'"),
    "asymmetric": (HGX.replace("GPU1\tNV18", "GPU1\tNV12"),
                   "f:2: row GPU0, column GPU1: NV18, but row GPU1, column GPU0 is NV12"),
    "row missing": (HGX.replace("GPU3\tNV", "#GPU3\tNV"), "f: the row of GPU3 is missing"),
    "cut off": (HGX[: HGX.index("GPU3\tNV18") + 14], "f:5: row GPU3, column GPU2: the cell is"),
    "two hosts": (HGX + HGX, "f:19: a second matrix: expected that of one host a file"),
    "peers": (" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n",
              "f:2: row GPU0, column GPU1: .* got 'OK'; this looks like `nvidia-smi topo -p2p`"),
    "column lost": (HGX.replace("GPU1\tGPU2", "GPU7\tGPU2"), "f:1: expected columns GPU0, GPU1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    """Each fault is found, and named with line, row and column."""
    text, message = BAD[case]
    with pytest.raises(InputError, match=message):
        from_text(text, "h", "f")


# `rocm-smi --showtopo`: links of AMD GPUs, and tables that cannot be right


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


BAD_ROCM = {
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


@pytest.mark.parametrize("case", BAD_ROCM)
def test_refused_rocm(case: str) -> None:
    """Each fault is found, and named with line, row and column."""
    text, message = BAD_ROCM[case]
    with pytest.raises(InputError, match=message):
        from_text(text, "h", "f", nics=1)
