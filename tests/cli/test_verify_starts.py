"""``optsched verify`` reads start times of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from program import Cli

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOP = "# job shop\n2 2\n0 3 1 2\n1 4 0 1\n"


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (("job,machine,start", "0,m0,0", "0,m1,4", "1,m1,0", "1,m0,4"), 0, "solves shop.txt"),
        (("start,note,job,machine", "0,x,0,0", "4,,0,1", "0,,1,1", "4,,1,0"), 0, "makespan 6"),
        (("job,machine,start", "0,m0,0", "0,m1,3", "1,m1,0", "1,m0,4"), 1, "overlap"),
        (("job,machine,start", "0,m0,0"), 2, "s.csv: starts: operation(job 0, stage 1)"),
        (("job,machine,start", "0,m0," + "9" * 5000), 2, "s.csv: starts[0][2]: expected"),
        (("job,machine,start", "0,m0,x"), 2, 's.csv: starts[0][2]: expected an integer'),
        (("job,machine", "0,m0"), 2, 's.csv:1: column "start" is missing'),
        (("job,machine,start", "0,9,1"), 2, "s.csv: starts[0]: no machine 9"),
    ],
)  # fmt: skip
def test_csv_of_starts(
    lines: Sequence[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Names or numbers of machines, columns in any order; faults name file and row."""
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path, monkeypatch, capsys)
    Path("shop.txt").write_text(SHOP)
    Path("s.csv").write_text("\n".join(lines) + "\n")
    ran = cli("verify", "s.csv", "--problem", "shop.txt")
    assert ran.code == code and said in ran.out + ran.err
    ran = cli("verify", "s.csv")
    assert ran.code == 2 and "give --problem FILE" in ran.err
