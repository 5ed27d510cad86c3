"""The reference scenarios of serving, a quarter of a second of bursts each.

python instances/routing/make_routing.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from optsched.serving.workload import LINKS, reference


def write_all(folder: Path) -> None:
    """Write every reference cluster with its arrivals."""
    for name in LINKS:
        scenario = reference(name, rate=2500, burst=3, seconds=0.25, seed=1)
        scenario.write(folder / f"{name}.routing.json")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
