"""Cells of a `torch.distributed.pipelining` CSV: ``<stage><F|B|I|W><micro-batch>``, strictly."""

from __future__ import annotations

import csv
import io
import re
from typing import Final, NamedTuple, NoReturn

from optsched.errors import InputError
from optsched.io.strict_json import format_json

KINDS: Final = ("F", "B", "I", "W")

_BLOCK: Final = re.compile(r"(0|[1-9][0-9]{0,6})([FBIW])(0|[1-9][0-9]{0,6})")
_OVERLAP: Final = re.compile(r"\(([0-9]+F[0-9]+);([0-9]+[BI][0-9]+)\)OVERLAP_F_B")
_COMMUNICATION: Final = re.compile(
    r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*"
)


class Block(NamedTuple):
    """What a cell says: a forward, backward, input- or weight-gradient block."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Cell(NamedTuple):
    """A block and where it stands, ``file:row:cell``, both from 1."""

    block: Block
    place: str


def cells_of(text: str, name: str) -> list[list[Cell]]:
    """The blocks of every rank in order; idle cells are left out.

    A cell ``(0F4;7B0)OVERLAP_F_B`` gives two blocks, first F, then B.

    Raises
    ------
    InputError
        No row, a blank row, or a cell that is no block; torch accepts more, such as ``0F0x``.
    """
    rows: list[list[Cell]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for number, cells in enumerate(reader, 1):
            row = [
                Cell(block, place)
                for k, cell in enumerate(cells, 1)
                if (stripped := cell.strip())
                for place in [f"{name}:{number}:{k}"]
                for block in _blocks(stripped, place)
            ]
            if not row:
                raise InputError(f"{name}:{number}: a row without blocks; every rank needs some")
            rows.append(row)
    except csv.Error as error:
        raise InputError(f"{name}:{len(rows) + 1}: not valid CSV ({error})") from None
    if not rows:
        raise InputError(f"{name}: the file is empty, expected one row per rank")
    return rows


def _blocks(cell: str, place: str) -> list[Block]:
    if overlap := _OVERLAP.fullmatch(cell):
        return [_block(part, place) for part in overlap.groups()]
    return [_block(cell, place)]


def _block(cell: str, place: str) -> Block:
    if not (found := _BLOCK.fullmatch(cell)):
        _refuse(cell, place)
    stage, kind, microbatch = found.groups()
    return Block(kind, int(stage), int(microbatch))


def _refuse(cell: str, place: str) -> NoReturn:
    if _COMMUNICATION.fullmatch(cell):
        raise InputError(
            f"{place}: {format_json(cell)} is communication; export the file with "
            'format="compute_only"'
        )
    raise InputError(
        f"{place}: expected <stage><F|B|I|W><micro-batch> such as 0F0, got {format_json(cell)}"
    )
