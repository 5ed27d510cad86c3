"""Append-only file of checksummed lines; what `Journal.append` has accepted survives a kill.

A line is eight hexadecimal digits, a space and JSON. The digits are the CRC-32 of the JSON,
continued from the line before, so that a missing, moved or changed line is found. A line is
written once the line before is on the disk: only the last one can be incomplete after a crash.
"""

from __future__ import annotations

import logging
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.files import read_bytes, write_atomic
from optsched.service.answers import Refused

if TYPE_CHECKING:
    from pathlib import Path

_sync = getattr(os, "fdatasync", os.fsync)
_log = logging.getLogger(__name__)


class StorageError(Refused):
    """The disk is full, read-only or broken: a change was refused, memory is as before."""

    def __init__(self, message: str) -> None:
        super().__init__(503, f"journal: {message}; nothing was changed")


class Journal:
    """An open journal.

    `size` and `crc` are those of its complete lines; bytes behind them are removed.
    """

    def __init__(self, path: Path, size: int, crc: int) -> None:
        self.path, self._size, self._crc = path, size, crc
        self._uncertain = False
        """Whether bytes of a failed write may follow the last accepted line."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            if (left := os.fstat(self._file).st_size - size) > 0:
                _log.warning("%s: removed an incomplete last line of %d bytes", path, left)
                os.ftruncate(self._file, size)
                os.fsync(self._file)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None

    @classmethod
    def open(cls, path: Path) -> tuple[Journal, list[bytes]]:
        """Open a file and return the contents of its lines; remove an incomplete last line."""
        lines, size, crc = _scan(path)
        return cls(path, size, crc), lines

    @classmethod
    def create(cls, path: Path, content: bytes) -> Journal:
        """Write a journal of one line, all of it or nothing; an existing file is replaced."""
        line, crc = _line(content, 0)
        try:
            write_atomic(path, line, durable=True)
            return cls(path, len(line), crc)
        except InputError as error:
            raise StorageError(str(error)) from None

    def append(self, content: bytes) -> None:
        """Write one line and wait until it is on the disk.

        If the process is killed after a `StorageError` and before the next success, the file may
        have the line all the same.
        """
        line, crc = _line(content, self._crc)
        try:
            if os.stat(self.path).st_ino != os.fstat(self._file).st_ino:
                raise OSError(0, "another file has this name by now: start the service again")
            if self._uncertain:
                os.ftruncate(self._file, self._size)
            self._uncertain = True
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            _sync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from None
        self._uncertain = False
        self._size += len(line)
        self._crc = crc

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _line(content: bytes, before: int) -> tuple[bytes, int]:
    """Return a line, and its checksum, from which that of the next line is continued."""
    crc = zlib.crc32(content, before)
    return b"%08x %b\n" % (crc, content), crc


def _scan(path: Path) -> tuple[list[bytes], int, int]:
    """Return the contents of the lines, their size in bytes, and the last checksum."""
    data = read_bytes(path)
    found: list[bytes] = []
    crc = end = 0
    while end < len(data):
        newline = data.find(b"\n", end) + 1
        line = data[end : newline or len(data)]
        expected, after = _line(line[9:-1], crc)
        if line != expected:
            is_cut = not newline and line[:-1] != expected[:-1]
            is_unfilled = newline == len(data) and b"\0" in line
            if found and (is_cut or is_unfilled):
                break
            raise _damaged(path, len(found) + 1)
        found.append(line[9:-1])
        crc, end = after, newline
    if not found:
        raise _damaged(path, 1)
    return found, end, crc


def _damaged(path: Path, number: int) -> InputError:
    keep = f"; or keep only the changes before it: head -n {number - 1} FILE > REPAIRED"
    return InputError(
        f"{path}:{number}: damaged: the line does not match its checksum, or a line before it is "
        f"missing. Restore the file from a copy{keep if number > 1 else ''}"
    )
