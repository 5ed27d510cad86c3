"""A small part of ``make fuzz``: damaged files of every kind are read or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from depth import depth
from fuzz_readers import Kind, content, fault, kinds

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def table() -> dict[str, Kind]:
    """All kinds of files."""
    return kinds()


def test_examples_are_read(table: dict[str, Kind], tmp_path: Path) -> None:
    """Undamaged files are read, so that damage is what the other test sees."""
    for name, kind in table.items():
        for example in kind.examples:
            assert fault(kind, example, tmp_path / "file") == "", name
            (tmp_path / "file").write_text(example)
            kind.read(tmp_path / "file")


def test_damaged_files(table: dict[str, Kind], tmp_path: Path) -> None:
    """Each is read, or refused in one sentence."""
    for name, kind in table.items():
        for seed in range(depth(60)):
            wrong = fault(kind, content(kind, name, seed), tmp_path / "file")
            assert not wrong, f'{wrong}; python tests/fuzz_readers.py --kind "{name}" --seed {seed}'
