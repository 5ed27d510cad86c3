"""How the GPUs of a host are joined, by the name of the product; what no name tells is unknown."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from optsched.bandwidth.topology.links import SELF


class Product(NamedTuple):
    """GPUs of a name (in capitals, words joined by ``-``)."""

    name: str
    """Regular expression."""
    way: str
    """How they are joined, in words."""
    boards: dict[int, str]
    """By GPUs a host the link of every pair, where all pairs are alike."""
    source: str
    rack: int = 0
    """Most GPUs that NVLink joins across machines; 0: none."""


_SXM, _CARD = "(SXM|HBM3|DGX|HGX)", "(PCIE|NVL|CNX)"
_EITHER = "NVLink on SXM boards, PCIe on cards"

PRODUCTS: Final = (
    Product(r"\bGB[23]00\b", "NVLink, also to other hosts of the rack", {4: "NV18"},
            "DGX GB200 user guide: trays of 4 GPUs, 18 NVLinks each to the rack's switches", 72),
    Product(rf"\bH(100|200|800)\b.*{_CARD}|{_CARD}.*\bH(100|200|800)\b", "PCIe, bridges in pairs",
            {}, "data sheets H100, H200 NVL: bridge of 2 or 4 cards is optional"),
    Product(rf"\bH(100|200|20)\b.*{_SXM}|{_SXM}.*\bH(100|200|20)\b|^NVIDIA-H(200|20)\b", "NVLink",
            {8: "NV18"}, "data sheets H100, H200 SXM: 900 GB/s, 18 links; DGX H100: NV18"),
    Product(rf"\bH800\b.*{_SXM}|^NVIDIA-H800\b", "NVLink", {8: "NV8"},
            "data sheet H800 SXM: 400 GB/s, 8 links"),
    Product(r"\bB[123]00\b", "NVLink", {8: "NV18"}, "data sheet DGX B200: 14.4 TB/s, 18 links"),
    Product(rf"\bA100\b.*{_SXM}|{_SXM}.*\bA100\b", "NVLink", {8: "NV12", 16: "NV12"},
            "data sheet A100 SXM: 600 GB/s, 12 links; DGX A100: NV12"),
    Product(rf"\bA800\b.*{_SXM}", "NVLink", {8: "NV8"}, "data sheet A800 SXM: 400 GB/s, 8 links"),
    Product(rf"\b[AV]100S?\b.*{_CARD}|\bA800\b.*{_CARD}|\bV100S\b", "PCIe, bridges in pairs", {},
            "data sheets A100, V100 PCIe"),
    Product(rf"\b[VP]100\b.*{_SXM}|{_SXM}.*\b[VP]100\b", "NVLink, not all pairs alike",
            {16: "NV6"}, "white papers DGX-1 (cube mesh), DGX-2 (16 GPUs, 6 links to switches)"),
    Product(r"\b([AHV]100|H[28]00|A800|P100)\b", _EITHER, {}, "data sheets"),
    Product(r"\b(A30|A40|A6000|A5500|A5000|A4500|3090|2080|8000)\b", "PCIe, bridges in pairs", {},
            "data sheets: a bridge of 2 cards is optional"),
    Product(r"\b(L40S?|L20|L4|L2|T4G?|A10G?|A16|A2|P40|P4|M60|K80|RTX|GTX|TITAN|QUADRO)\b", "PCIe",
            {}, "data sheets: no NVLink, or a bridge"),
    Product(r"\bMI(3\d\d[AXP]?|250X?|210|100|50|60)\b", "XGMI", {},
            "data sheets: all 8 GPUs of MI300X, MI325X, MI355X are joined, of others some"),
)  # fmt: skip
"""The first whose name matches counts. Rates are those of `links`, until something is measured."""


def product_of(name: str) -> Product | None:
    """The product that the name of a type of hosts is about; of parts of GPUs (MIG) none."""
    words = re.sub("[^A-Z0-9]+", "-", name.upper())
    if re.search(r"\b(MIG|SHARED)\b", words):
        return None
    return next((one for one in PRODUCTS if re.search(one.name, words)), None)


def product_links(name: str, gpus: int) -> tuple[tuple[str, ...], ...] | None:
    """The matrix of links of a host with so many of these GPUs; None if its name does not tell."""
    product = product_of(name)
    link = None if product is None else product.boards.get(gpus)
    if link is None:
        return None
    return tuple(tuple(SELF if i == k else link for k in range(gpus)) for i in range(gpus))
