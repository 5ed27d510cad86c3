"""The comparison of five timings with another commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks import regression  # noqa: E402

BASE = Path("base")


@pytest.mark.parametrize(
    ("here", "there", "code", "printed"),
    [
        (1.0, 1.0, 0, "1.00"),
        (1.3, 1.0, 1, "slower than 1.2 times"),
        (1.0, None, 0, "does not run at the base"),
        (None, 1.0, 1, "does not run here"),
    ],
)
def test_codes(
    here: float | None, there: float | None, code: int, printed: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A slower timing and one that fails here are found; one that the base lacks is named."""
    monkeypatch.setattr(regression, "run", lambda at, name: there if at == BASE else here)
    assert regression.compare(BASE, ["quotas"], 3, 1.2) == code
    assert printed in capsys.readouterr().out


def test_one_slow_measurement_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ratio above the limit counts only if it is there twice."""
    times = iter([2.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(regression, "run", lambda at, name: next(times))
    assert regression.compare(BASE, ["quotas"], 1, 1.2) == 0
    assert "2.00" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--base", "no such commit"]])
def test_wrong_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are named, without a traceback."""
    with pytest.raises(SystemExit, match="2"):
        regression.main(words)
    assert f"{words[0]}: " in capsys.readouterr().err


def test_a_process_prints_its_seconds() -> None:
    """With the library of this checkout."""
    found = regression.run(ROOT, "quotas")
    assert found is not None and 0 < found < 60


def test_a_checkout_without_the_library(tmp_path: Path) -> None:
    """It fails there, without an exception."""
    (tmp_path / "optsched").mkdir()
    (tmp_path / "optsched" / "__init__.py").write_text("raise ImportError('none')")
    assert regression.run(tmp_path, "orders") is None
