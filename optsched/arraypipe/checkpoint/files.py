"""Files of checkpoints: written through to the disk, complete before they get their name."""

from __future__ import annotations

import json
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

from optsched.arraypipe.checkpoint.plain import kept
from optsched.arraypipe.runtime.cuda_streams import page_locked_like
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INDEX: Final = "model.safetensors.index.json"
_HALF_DONE: Final = (".tmp-", ".parts-", ".merging")
_TRAIN: Final = re.compile(r"train-(\d{5})-of-(\d{5})\.pt")


def stage_file(kind: str, stage: int, n_stages: int) -> str:
    """Name of a file of one stage; kinds are model, frozen and train."""
    ending = "pt" if kind == "train" else "safetensors"
    return f"{kind}-{stage + 1:05d}-of-{n_stages:05d}.{ending}"


def train_files(checkpoint: Path) -> list[Path]:
    """The train files of all stages of a checkpoint in their order; none if one is missing."""
    found = sorted(path for path in checkpoint.iterdir() if _TRAIN.fullmatch(path.name))
    totals = {int(_TRAIN.fullmatch(path.name)[2]) for path in found}  # type: ignore[index]
    return found if totals == {len(found)} else []


def numbered(place: Path) -> list[int]:
    """Iterations of the checkpoints in a folder, ascending; none if there is no such folder."""
    return sorted(
        int(entry.name)
        for entry in (place.iterdir() if place.is_dir() else ())
        if entry.name.isdecimal()
        and entry.name == str(int(entry.name))
        and not entry.is_symlink()
        and entry.is_dir()
        and any(path.name == INDEX or _TRAIN.fullmatch(path.name) for path in entry.iterdir())
    )


def damage(checkpoint: Path, sums: dict[tuple[int, int, int], int]) -> str:
    """Return why a checkpoint cannot be read, "" if it can.

    Everything is read and compared with checksums, but no tensor is kept; `sums` has the checksums
    of files that were read before, by inode and time.
    """
    try:
        files, expected = train_files(checkpoint), dict[str, int]()
        if not files:
            return "a file train-*.pt is missing"
        for path in files:
            with zipfile.ZipFile(path) as archive:
                # reads all and compares the checksums, which `torch.load` does not look at
                if _checked() and archive.testzip():
                    return f"{path.name} is damaged"
            loaded = load(path, "meta")
            expected.update(loaded.get("checksums", {}) if isinstance(loaded, dict) else {})
        path = checkpoint / INDEX
        index = json.loads(path.read_text())
        if missing := {*index["weight_map"].values()} - expected.keys():
            return f"{INDEX} names {min(missing)}, which no stage has written"
        expected.update(index["metadata"].get("checksums", {}))
        for path in checkpoint.glob("*config.json"):
            json.loads(path.read_text())
        for name, known in expected.items():
            path = checkpoint / name
            status = path.stat()
            key = status.st_dev, status.st_ino, status.st_mtime_ns
            if key not in sums:
                sums[key] = _checksum(path)
            if sums[key] != known:
                return f"{name} is damaged"
    except FileNotFoundError:
        return f"{path.name}: no such file"
    except Exception as error:  # damaged content may raise any
        return f"{path.name} cannot be read ({_why(error)})"
    return ""


def _checked() -> bool:
    """Return whether files of `torch.save` have checksums (torch >= 2.6 can leave them out)."""
    return bool(getattr(torch.serialization, "get_crc32_options", lambda: True)())


def _why(error: Exception) -> str:
    """A short sentence; torch's message advises to load without `weights_only`."""
    text = " ".join(str(error).split())
    if found := re.search(r"Unsupported (?:global: GLOBAL|class|operand) (\S+)", text):
        return f"it holds {found[1]}, which weights_only=True does not read"
    return f"{type(error).__name__}: {text:.200}"


def _checksum(path: Path) -> int:
    """Return CRC-32 of a file."""
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def replace_file(target: Path, value: Any) -> None:
    """Write one file by way of a temporary neighbor: a string as text, else by `torch.save`."""
    with writing(target.parent):
        temporary = target.parent / f".tmp-{uuid4().hex}"
        try:
            with temporary.open("wb") as stream:
                if isinstance(value, str):
                    stream.write(value.encode())
                else:
                    torch.save(value, stream)
                stream.flush()
                os.fsync(stream.fileno())
            handle = os.open(target.parent, os.O_RDONLY)
            try:
                temporary.replace(target)  # now another rank may complete and rename the folder
                os.fsync(handle)
            finally:
                os.close(handle)
        finally:
            temporary.unlink(missing_ok=True)


def load(path: Path, device: str = "cpu", mmap: bool = False) -> Any:
    """Read a file of `torch.save`; `InputError` with its name if that fails."""
    try:
        return torch.load(path, weights_only=True, map_location=device, mmap=mmap or None)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({_why(error)})") from error


def check_writable(place: Path) -> None:
    """Make a folder and try to write in it."""
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        probe = place / f".tmp-{uuid4().hex}"
        probe.mkdir()
        with suppress(FileNotFoundError):  # another process sweeps at this moment
            probe.rmdir()


def sweep(place: Path) -> None:
    """Remove what a killed run has left half done."""
    for entry in [*place.iterdir()]:
        if entry.name.startswith(_HALF_DONE):
            with suppress(FileNotFoundError):  # the probe of another process
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def copied(value: Any, place: str | None = None) -> Any:
    """Return a copy of a state as `kept` makes one, with dense tensors on the CPU."""
    return kept(value, place, _on_host)


def _on_host(value: Tensor) -> Tensor:
    return off_gpu(value.detach()) if value.is_cuda else value.detach().to("cpu", copy=True)


def off_gpu(value: Tensor) -> Tensor:
    """Return a copy in page-locked memory, for which the host does not wait."""
    target = page_locked_like(value)
    # by way of a temporary the host would read it before the copy is complete
    return target.copy_(value, non_blocking=target.stride() == value.stride())


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn errors of the file system into an `InputError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"checkpoint: {place} cannot be written ({error.strerror or error})"
        ) from None
