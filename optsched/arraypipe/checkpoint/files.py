"""Files of checkpoints: written through to the disk, and under their name only whole."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import torch
from torch import Tensor

from optsched.arraypipe.checkpoint.plain import NotKept, kept
from optsched.arraypipe.runtime.cuda_streams import page_locked_like
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


NAMES: Final = frozenset({"model.pt", "train.pt"})
"""Files of a checkpoint."""
_HALF_DONE: Final = (".tmp-", ".parts-", ".merging")


def numbered(place: Path) -> list[int]:
    """Iterations of the checkpoints in a folder, ascending; none if there is no such folder.

    Folders that are named otherwise, or have anything else in them, are not ours.
    """
    return sorted(
        int(entry.name)
        for entry in (place.iterdir() if place.is_dir() else ())
        if entry.name.isdecimal()
        and entry.name == str(int(entry.name))
        and not entry.is_symlink()
        and entry.is_dir()
        and {file.name for file in entry.iterdir()} == NAMES
    )


def damage(checkpoint: Path) -> str:
    """Why a checkpoint cannot be read, found without loading it; "" if it can."""
    loaded: Any = None
    for name in sorted(NAMES):  # train.pt last
        reason, loaded = tried(checkpoint / name)
        if reason:
            return reason
    known = loaded.get("model_checksum") if isinstance(loaded, dict) else None
    if _checked() and known not in (None, checksum(checkpoint / "model.pt")):
        return "model.pt is not the one that train.pt was written with"
    return ""


def tried(path: Path) -> tuple[str, Any]:
    """Why a file cannot be read, beginning with its name, "" if it can; what is in it, no data."""
    try:
        with zipfile.ZipFile(path) as archive:
            # reads all and compares the checksums, which `torch.load` does not look at
            damaged = archive.testzip() if _checked() else None
        loaded = torch.load(path, weights_only=True, map_location="meta")
    except FileNotFoundError:
        return f"{path.name}: no such file", None
    except Exception as error:  # of a damaged list of its entries any may come
        return f"{path.name} cannot be read ({_why(error)})", None
    return f"{path.name} is damaged" if damaged else "", loaded


def _checked() -> bool:
    """Whether files of `torch.save` have checksums (torch >= 2.6 can leave them out)."""
    return bool(getattr(torch.serialization, "get_crc32_options", lambda: True)())


def _why(error: Exception) -> str:
    """A short sentence; torch's own advises to load without `weights_only`."""
    text = " ".join(str(error).split())
    if found := re.search(r"Unsupported (?:global: GLOBAL|class|operand) (\S+)", text):
        return f"it holds {found[1]}, which weights_only=True does not read"
    return f"{type(error).__name__}: {text:.200}"


def checksum(path: Path) -> int:
    """Of all entries of a file of `torch.save`, by their own checksums."""
    with zipfile.ZipFile(path) as archive:
        return zlib.crc32(
            repr([(entry.filename, entry.CRC) for entry in archive.infolist()]).encode()
        )


def write_folder(target: Path, contents: Mapping[str, Any]) -> None:
    """Make a folder of `torch.save` files; it appears under its name with all of them, or not.

    A folder of that name is replaced: it was left by a run that was killed before it moved the
    pointer.
    """
    temporary = _temporary(target.parent)
    try:
        temporary.mkdir()
        save(contents["model.pt"], temporary / "model.pt")
        tied = {"model_checksum": checksum(temporary / "model.pt")}
        save({**contents["train.pt"], **tied}, temporary / "train.pt")
        if reason := damage(temporary):  # read as it will be, before it takes a name
            raise NotKept(f"{target}: {reason}; what was written before stays")
        sync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(target.parent)


def replace_file(target: Path, value: Any) -> None:
    """Write one file by way of a temporary neighbour: a string as text, else by `torch.save`.

    `NotKept`: it cannot be read again; the file that was there stays.
    """
    with writing(target.parent):
        temporary = _temporary(target.parent)
        try:
            save(value, temporary)
            if not isinstance(value, str) and (reason := tried(temporary)[0]):
                reason = reason.replace(temporary.name, target.name)
                raise NotKept(f"{target.parent}: {reason}; what was written before stays")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)


def save(value: Any, path: Path) -> None:
    """Write a file through to the disk."""
    with path.open("wb") as stream:
        if isinstance(value, str):
            stream.write(value.encode())
        else:
            torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def load(path: Path, mmap: bool = False) -> Any:
    """What `save` has written, on the CPU; `InputError` with the name of the file if it cannot."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap or None)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({_why(error)})") from error


def check_writable(place: Path) -> None:
    """Make a folder and try to write in it."""
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        probe = _temporary(place)
        probe.mkdir()
        with suppress(FileNotFoundError):  # another process tidies up at this moment
            probe.rmdir()


def sweep(place: Path) -> None:
    """Remove what a killed run has left half done."""
    for entry in [*place.iterdir()]:
        if entry.name.startswith(_HALF_DONE):
            with suppress(FileNotFoundError):  # the probe of another process
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def copied(value: Any, place: str | None = None) -> Any:
    """A copy of a state as `kept` makes one, tensors as dense ones of their own on the CPU.

    A view of a larger storage would be saved with all of it. What is on a GPU is copied in the
    current stream, before whatever changes it next, and is there when that has got so far.
    """
    return kept(value, place, _on_host)


def _on_host(value: Tensor) -> Tensor:
    return off_gpu(value.detach()) if value.is_cuda else value.detach().to("cpu", copy=True)


def off_gpu(value: Tensor) -> Tensor:
    """A copy in page-locked memory, for which the host does not wait."""
    target = page_locked_like(value)
    # by way of a temporary the host would read it before the copy is there
    return target.copy_(value, non_blocking=target.stride() == value.stride())


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What the file system refuses is an `InputError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"checkpoint: {place} cannot be written ({error.strerror or error})"
        ) from None


def _temporary(place: Path) -> Path:
    return place / f".tmp-{uuid4().hex}"
