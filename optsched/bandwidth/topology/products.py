"""How the GPUs of a host are joined, by the name of the product; other links are unknown."""

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
    Product(r"\bGB[23]00\b|^A4X-", "NVLink, also to other hosts of the rack",
            {4: "NV18"}, "DGX GB200 user guide: trays of 4 GPUs, 18 links each to the rack's "
            "switches; the same as P6e-GB200 of AWS, ND GB200 v6 of Azure, A4X of Google", 72),
    Product(r"^P4DE?-24XL|^A2-(HIGH|MEGA|ULTRA)GPU|^STANDARD-ND96AM?SR\b|^BM-GPU(4|-A100-V2)-8\b"
            r"|^NVIDIA-(TESLA-A100|A100-80GB)(-X\d+)?$", "NVLink", {8: "NV12", 16: "NV12"},
            "A100 with NVSwitch, 600 GB/s: EC2 P4, Google A2 (and labels of GKE and EKS), Azure ND "
            "A100 v4, OCI BM.GPU4 and BM.GPU.A100-v2"),
    Product(r"^P5(E|EN)?-48XL|^A3-(HIGH|MEGA|ULTRA)GPU-8G|^STANDARD-ND96ISR-H[12]00-V5"
            r"|^BM-GPU-H[12]00-8\b|^NVIDIA-(H100-80GB|H100-MEGA-80GB|H200-141GB)(-X\d+)?$",
            "NVLink", {8: "NV18"}, "H100 and H200 with NVSwitch, 900 GB/s: EC2 P5, Google A3 (and "
            "labels of GKE), Azure ND H100 and H200 v5, OCI BM.GPU.H100 and BM.GPU.H200"),
    Product(r"^P6-B[23]00-|^A4-HIGHGPU-8G|^BM-GPU-B[23]00-8\b", "NVLink", {8: "NV18"},
            "B200 and B300 with NVSwitch, 1.8 TB/s: EC2 P6, Google A4, OCI BM.GPU.B200"),
    Product(r"^P3(DN)?-\d+XL|^STANDARD-ND40RS-V2|^BM-GPU3-8\b", "NVLink, not all pairs alike", {},
            "V100 in a cube mesh: EC2 P3, Azure NDv2, OCI BM.GPU3"),
    Product(r"^STANDARD-NC\d+ADI?S-(A100-V4|H100-V5)", "PCIe, bridges in pairs", {},
            "A100 PCIe, H100 NVL: Azure NC A100 v4, NCads H100 v5"),
    Product(r"^G[4-6](DN|AD|E|F|G)?-\d*XL|^G[24]-STANDARD|^A3-HIGHGPU-[124]G"
            r"|^STANDARD-(NC\d+AS-T4|NV\d+)",
            "PCIe, or part of a host", {},
            "T4, A10G, L4, L40S, A10: EC2 G4, G5, G6, G6e, Google G2, G4, Azure NCas T4 v3, NV"),
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
    Product(r"\bMI3[0-9][0-9]X\b", "XGMI", {8: "NV2"},
            "data sheets MI300X, MI325X, MI355X: all 8 GPUs are joined; NV2 as in rocm_topo"),
    Product(r"\bMI(3\d\d[AXP]?|250X?|210|100|50|60)\b", "XGMI", {},
            "data sheets: of 8 GPUs or dies some pairs are joined"),
)  # fmt: skip
"""The first match counts. Rates are those of `links`, until something is measured."""


def product_of(name: str) -> Product | None:
    """The product that the name of a type of hosts is about; of parts of GPUs (MIG) none."""
    text = re.sub("[^A-Z0-9]+", "-", name.upper())
    if re.search(r"\b(MIG|SHARED)\b", text):
        return None
    return next((one for one in PRODUCTS if re.search(one.name, text)), None)


def product_links(name: str, gpus: int) -> tuple[tuple[str, ...], ...] | None:
    """The matrix of links of a host with so many of these GPUs; None if the name does not say."""
    product = product_of(name)
    link = None if product is None else product.boards.get(gpus)
    if link is None:
        return None
    return tuple(tuple(SELF if i == k else link for k in range(gpus)) for i in range(gpus))
