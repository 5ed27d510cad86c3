"""Reading and writing whole files without ever leaving half a file behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from optsched.errors import InputError


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Content of a file; an `InputError` with one sentence if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, expected a file") from None
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({_reason(error)})") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Content of a UTF-8 text file, without a byte-order mark."""
    return decode_text(read_bytes(path), str(path))


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8, without a byte-order mark; `InputError` names the first bad byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name}:{line}: not a text file in UTF-8 (byte {error.start} is "
            f"0x{data[error.start]:02x})"
        ) from None


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file by way of a temporary neighbour and a rename: all of it, or nothing."""
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    if target.is_dir():
        raise InputError(f"{target}: is a directory, expected a file name")
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{target.name[:64]}.", suffix=".tmp", dir=target.parent
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{target}: cannot be written ({_reason(error)})") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{target}: cannot be written ({_reason(error)})") from None
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse an output path before any work is spent on what goes there."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{target}: is a directory, expected a file name")
    if not target.parent.is_dir():
        raise InputError(f"{target}: cannot be written (there is no folder {target.parent})")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{target}: cannot be written (no permission in {target.parent})")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
