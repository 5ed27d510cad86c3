"""Make the traces of this folder.

    python make.py            # rewrite the *.csv files beside this script

Jobs are made up by `optsched.cluster.workload.synthetic`, by seed: same seed, same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optsched.cluster.workload.synthetic import synthetic
from optsched.cluster.workload.trace import write_trace

if TYPE_CHECKING:
    from optsched.cluster.workload.workload import Workload

HERE = Path(__file__).parent
SEED = 7


def traces() -> dict[str, Workload]:
    """All of them, by file name."""
    return {
        "synthetic-400.csv": synthetic(400, 1.1, SEED, gpus=32, groups=5),
        "bursts-60.csv": synthetic(
            60, 3.0, SEED, gpus=16, duration=(300.0, 1.0), sizes={1: 0.5, 2: 0.3, 4: 0.2}
        ),
    }


def main() -> None:
    """Write all traces."""
    for name, workload in traces().items():
        write_trace(workload, HERE / name)


if __name__ == "__main__":
    main()
