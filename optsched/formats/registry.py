"""Formats by name: those of this package, and entry points of other packages.

Entry points of the group ``optsched.formats`` are a `Reader`; see ``docs/orders/formats.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.io.values import one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import Problem

GROUP: Final = "optsched.formats"
"""The group of entry points."""

_DOCUMENTS: Final = (
    "arraypipe:READER",
    "shop_json:READER",
    "pipelining_csv:READER",
    "job_table:READER",
)
_TEXTS: Final = ("standard:READER", "taillard:READER")
"""Tried last: together they refuse unknown texts."""

_LOGS: Final = ("SACCT", "HELIOS", "ALIBABA2020", "ALIBABA2023", "PHILLY", "SWF", "TIRESIAS", "CSV")


@dataclass(frozen=True)
class Source:
    r"""Text of a file to read, with its name.

    Parameters
    ----------
    file
        Its name, for messages.
    text
        Its text.
    tree
        The parsed tree of a JSON file.
    reentrant
        Rows of a job-shop text may have any length, machines may repeat or be skipped.

    Examples
    --------
    >>> from optsched.formats.registry import Source
    >>> Source("toy.txt", "1 2\n0 3 1 2\n").text.splitlines()[0]
    '1 2'
    """

    file: str
    text: str
    tree: Any = None
    reentrant: bool = False


@dataclass(frozen=True)
class Reader:
    """Name, recognition, reading and writing of a foreign format.

    Parameters
    ----------
    name
        Name for ``optsched convert --from NAME``.
    recognises
        Whether a file can only be of this format, by its content.
    read
        The problem in a file, or the runs of a log (`optsched.formats.job_logs.Run`); `InputError`
        with the place of the first fault.
    write
        The text of a problem, `InputError` for one that the format cannot hold; None: it cannot
        be written.
    endings
        Suffixes of file names that ``optsched convert`` writes in this format.
    holds
        Description of the written part, if a file does not hold the whole problem; otherwise
        ``optsched convert`` reads the file again and compares.
    kind
        ``"problem"``, or ``"trace"``: a log of jobs, which ``optsched cluster workload`` reads.

    Examples
    --------
    >>> from optsched.formats.registry import Reader
    >>> words = Reader("words", lambda source: source.text.startswith("words "), read=None)
    >>> words.kind, words.write is None
    ('problem', True)
    """

    name: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Any]
    write: Callable[[Problem], str] | None = None
    endings: tuple[str, ...] = ()
    holds: str = ""
    kind: str = "problem"


@cache
def readers(kind: str = "problem") -> dict[str, Reader]:
    """Return all readers of a kind by name, in the order of recognition.

    Raises
    ------
    InputError
        An entry point that is not a `Reader`, or has the name of another one.

    Examples
    --------
    >>> from optsched.formats.registry import readers
    >>> {"standard", "taillard", "table"} <= set(readers())
    True
    """
    from importlib.metadata import entry_points  # takes 20 ms

    logs = kind == "trace"
    found = [
        _load(place) for place in ([f"job_logs:{log}" for log in _LOGS] if logs else _DOCUMENTS)
    ]
    for point in entry_points(group=GROUP):
        reader = point.load()
        if not isinstance(reader, Reader):
            raise InputError(f"entry point {point.name} of {GROUP}: {point.value} is not a Reader")
        found += [reader] * (reader.kind == kind)
    found += map(_load, () if logs else _TEXTS)
    by_name = {reader.name: reader for reader in found}
    if len(by_name) < len(found):
        names = [reader.name for reader in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"entry points of {GROUP}: two formats are called {twice!r:.60}")
    return by_name


def written(problem: Problem, name: str) -> str:
    r"""Return the text of a problem in the format of this name; `InputError` if it has none.

    Examples
    --------
    >>> from optsched.formats.registry import written
    >>> written(optsched.JobShop([[(0, 3), (1, 2)]]), "standard")
    '1 2\n0 3 1 2\n'
    """
    write = readers()[one_of("format", name, writable())].write
    assert write is not None  # by `writable`
    return write(problem)


def writable() -> list[str]:
    """Return the names of the formats that can be written.

    Examples
    --------
    >>> from optsched.formats.registry import writable
    >>> {"standard", "taillard"} <= set(writable())
    True
    """
    return [name for name, reader in readers().items() if reader.write is not None]


def _load(place: str) -> Reader:
    module, _, attribute = place.partition(":")
    found: Reader = getattr(import_module(f"optsched.formats.{module}"), attribute)
    return found


def looks_like(text: str) -> str:
    """Return ``"; this looks like ..."`` if the kind of a text is recognized, else ``""``.

    Examples
    --------
    >>> from optsched.formats.registry import looks_like
    >>> looks_like("hello")
    ''
    """
    from optsched.bandwidth.topology import foreign  # imported only for an error
    from optsched.cluster.workload import trace

    return foreign.looks_like(text) or trace.looks_like(text)
