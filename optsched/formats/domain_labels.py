"""Domains of hosts as CSV ``host,level...``: what labels of Kubernetes nodes become."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from optsched.bandwidth.host_lists import expand
from optsched.errors import InputError
from optsched.formats.slurm_topology import Domains
from optsched.io.files import read_text

if TYPE_CHECKING:
    import os


def read(path: str | os.PathLike[str]) -> Domains:
    """Domains from a CSV; see `from_text`."""
    return from_text(read_text(path), str(path))


def from_text(text: str, name: str = "labels") -> Domains:
    """Domains from a CSV whose header is ``host`` and the levels, widest first.

    Parameters
    ----------
    text
        One line a host, or a list of hosts such as ``n[01-04]``.
    name
        File name for messages.

    Raises
    ------
    InputError
        With ``file:line``: another header, cells missing or empty, a host twice, or a domain that
        lies in two domains of the level above.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    levels: tuple[str, ...] | None = None
    of: dict[str, tuple[str, ...]] = {}
    above: dict[tuple[int, str], tuple[str, ...]] = {}
    while True:
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            break
        except csv.Error as error:
            raise InputError(f"{name}:{reader.line_num}: not valid CSV ({error})") from None
        place = f"{name}:{reader.line_num}"
        if not any(cells):
            continue
        if levels is None:
            levels = _levels(cells, place)
            continue
        if len(cells) != len(levels) + 1 or "" in cells:
            raise InputError(
                f"{place}: expected a host and a label for each of {', '.join(levels)}, "
                f"got {','.join(cells)!r:.60}"
            )
        way = tuple(cells[1:])
        for k, domain in enumerate(way):
            other = above.setdefault((k, domain), way[:k])
            if other != way[:k]:
                raise InputError(
                    f"{place}: {levels[k]} {domain!r:.60} lies in {'/'.join(other)!r:.60} and in "
                    f"{'/'.join(way[:k])!r:.60}: give it two names"
                )
        for host in expand(cells[0], f"{place}: host"):
            if host in of:
                raise InputError(f"{place}: host {host!r:.60} is there twice")
            of[host] = way
    if levels is None or not of:
        raise InputError(f"{name}: expected a header host,LEVEL,... and a line for every host")
    return Domains(levels, of)


def _levels(cells: list[str], place: str) -> tuple[str, ...]:
    levels = tuple(cells[1:])
    if cells[0] != "host" or not levels or "" in levels:
        raise InputError(f"{place}: expected a header host,LEVEL,..., got {','.join(cells)!r:.60}")
    if len(set(levels)) < len(levels) or "host" in levels:
        raise InputError(f"{place}: expected distinct levels other than 'host'")
    return levels
