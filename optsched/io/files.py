"""Reading and writing whole files; a failed write leaves no partial file."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 2**30
"""Limit for reading: an endless device would otherwise fill the memory."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Content of a file; an `InputError` with one sentence if it cannot be read."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path: expected the name of a file, got {path!r:.60}")
    try:
        with Path(path).open("rb") as stream:
            # files have a size; pipes and devices have none
            if (size := os.fstat(stream.fileno()).st_size) > MAX_BYTES:
                raise InputError(f"{path}: has {size} bytes, more than {MAX_BYTES}")
            content = stream.read(MAX_BYTES + 1) if not size else stream.read()
        if len(content) > MAX_BYTES:
            raise InputError(f"{path}: has more than {MAX_BYTES} bytes")
        return content
    except InputError:
        raise
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, expected a file") from None
    except FileNotFoundError:
        raise InputError(f"{one_line(str(path), 1000)}: no such file") from None
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
        at, packed = error.start, "; it is gzip: unpack it" * data.startswith(b"\x1f\x8b")
        text = f"not a text file in UTF-8 (byte {at} is 0x{data[at]:02x}){packed}"
        raise InputError(f"{name}:{line}: {text}") from None


def unpack_arrays(content: bytes, name: str, most: int) -> dict[str, Any]:
    """Arrays of an ``.npz`` file (at most so many bytes), without running code from it."""
    import numpy as np  # 0.1 s: not at import

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # sizes before contents
            if sum(entry.file_size for entry in archive.infolist()) > most:
                raise InputError(f"{name}: has more than {most} bytes of arrays")
        with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
            return {key: loaded[key] for key in loaded.files}
    except InputError:
        raise
    except (
        ValueError, KeyError, OSError, EOFError, MemoryError, NotImplementedError, RuntimeError,
        SyntaxError, TypeError, zipfile.BadZipFile, zlib.error,
    ):  # fmt: skip
        raise InputError(f"{name}: is not a file of arrays as this optsched writes it") from None


def write_atomic(path: str | os.PathLike[str], data: bytes | str, *, durable: bool = False) -> None:
    """Write a temporary file beside it, then rename; `durable`: on the disk before the return."""
    content = data.encode() if isinstance(data, str) else data
    check_writable(path)
    try:
        if _is_special(Path(path)):
            Path(path).write_bytes(content)
            return
        target = Path(os.path.realpath(path))  # replace the target of a link
        handle, temporary = tempfile.mkstemp(prefix=".optsched-", suffix=".tmp", dir=target.parent)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written ({_reason(error)})") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
        if durable:
            sync_folder(target.parent)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written ({_reason(error)})") from None
        raise


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse an output path that cannot be written, before any work is done."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path: expected the name of a file, got {path!r:.60}")
    try:
        target = Path(os.path.realpath(path))
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)  # is_dir hides that a name is too long, from Python 3.14 on
        if Path(path).is_dir():
            raise InputError(f"{path}: is a directory, expected a file name")
        if _is_special(Path(path)):
            return
        if not target.parent.is_dir():
            folder = Path(path).parent
            raise InputError(f"{path}: cannot be written (there is no folder {folder})")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written ({_reason(error)})") from None
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written (no permission in {target.parent})")


def check_outputs(
    outputs: Sequence[str | os.PathLike[str] | None],
    inputs: Sequence[str | os.PathLike[str] | None] = (),
) -> None:
    """Refuse outputs that cannot be written, share a name, or overwrite an input; skip None."""
    names: set[str] = set()
    for path in outputs:
        if path is None:
            continue
        check_writable(path)
        for given in (one for one in inputs if one is not None):
            exist = Path(path).is_file() and Path(given).exists()  # pipes and devices may be both
            if exist and os.path.samefile(path, given):
                raise InputError(f"{path}: is the file that is read; choose another name")
        real = os.path.realpath(path)
        if real in names and not _is_special(Path(path)):
            raise InputError(f"{path}: is the name of two outputs; choose another one")
        names.add(real)


def _is_special(path: Path) -> bool:
    """Whether this is a pipe or a device, such as /dev/stdout: not to be replaced."""
    return path.exists() and not path.is_file()


def _mode(target: Path) -> int:
    """Permissions of the existing file, or those of a new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
