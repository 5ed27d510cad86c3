"""Files of weights, tensor by tensor, and the configurations next to them."""

from __future__ import annotations

import json
import os
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.files import INDEX, load
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ADAPTER: Final = "adapter_model.safetensors"
_TYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def keeps(value: Any) -> bool:
    """Return whether a file of safetensors can hold a value of a state dict."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in _TYPES


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors as a file of safetensors, through to the disk; its CRC-32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    # wide types first, as the library writes them, so that all are aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        value = tensors[name]
        end = at + value.numel() * value.element_size()
        header[name] = {
            "dtype": _TYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        start = struct.pack("<Q", len(text)) + text
        stream.write(start)
        checksum = zlib.crc32(start)
        for name in order:
            value = tensors[name].detach().cpu().contiguous().reshape(-1)
            data = value.view(torch.uint8).numpy().data if value.numel() else b""
            stream.write(data)
            checksum = zlib.crc32(data, checksum)
        stream.flush()
        os.fsync(stream.fileno())
    return checksum


@dataclass(eq=False)
class Weights:
    """Tensors of files, read one at a time."""

    shapes: dict[str, tuple[int, ...]]  # by key
    read: Callable[[str], Tensor]
    folder: bool  # they are those of `from_pretrained`


def open_weights(path: Path) -> Weights:
    """Open a state dict of `torch.save`, a file of safetensors, or a folder with such files."""
    folder, places = path.is_dir(), None
    if folder:
        names = (INDEX, "model.safetensors", "pytorch_model.bin", "model.pt")
        there = [path / name for name in names if (path / name).exists()]
        if not there:
            raise InputError(f"{path}: has neither {', '.join(names[:-1])}")
        path = there[0]
    if not path.exists():
        raise InputError(f"{path}: no such file")
    files = {path.name: path}
    if path.name == INDEX:
        try:
            places = json.loads(path.read_text())["weight_map"]
            files = {name: path.with_name(name) for name in set(places.values())}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error
    elif path.suffix != ".safetensors":
        found = load(path, mmap=True)
        if not isinstance(found, dict):
            raise InputError(f"{path}: is not a dictionary of tensors")
        tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        return Weights(shapes, tensors.__getitem__, folder)
    return Weights(*_open_shards(files, places), folder or path.name == "model.safetensors")


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the state dict of a checkpoint, a `from_pretrained` folder or a file of weights.

    Examples
    --------
    >>> import tempfile, torch
    >>> from optsched.arraypipe import read_weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"scale": torch.ones(2)}, f"{folder}/start.pt")
    ...     read_weights(f"{folder}/start.pt")
    {'scale': tensor([1., 1.])}
    """
    weights = open_weights(Path(path))
    return {key: weights.read(key) for key in weights.shapes}


def _open_shards(
    files: Mapping[str, Path], places: Mapping[str, str] | None
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    from safetensors import SafetensorError, safe_open

    shards: dict[str, Any] = {}
    shapes, shard_of = {}, {}
    for name, path in sorted(files.items()):
        try:
            opened: Any = safe_open(path, framework="pt", device="cpu")
            shards[name] = opened
            for key in opened.keys():  # noqa: SIM118
                if places is None or places.get(key) == name:
                    shapes[key] = tuple(opened.get_slice(key).get_shape())
                    shard_of[key] = name
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error
    for key in (places or {}).keys() - shapes.keys():
        raise InputError(f"{files[places[key]]}: has no {key!r}")  # type: ignore[index]

    def read(key: str) -> Tensor:
        value: Tensor = shards[shard_of[key]].get_tensor(key)
        return value.clone()  # not the pages of the file, which may be replaced

    return shapes, read


def write_configs(model: nn.Module, checkpoint: Path) -> dict[str, int]:
    """Write ``config.json`` of a model of transformers; of PEFT's models the adapter, merged.

    Return checksums of the weights that were written.
    """
    adapters: Any = getattr(model, "peft_config", None)
    if isinstance(adapters, dict):
        learned = any(getattr(row, "is_prompt_learning", False) for row in adapters.values())
        if len(adapters) == 1 and not learned:  # what PEFT saves of prompts is no weight
            return _write_adapter(model, checkpoint, *adapters.items())
        return {}
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            try:
                config.save_pretrained(checkpoint)
            except Exception as error:  # a configuration that transformers finds invalid
                text = " ".join(str(error).split())
                warnings.warn(f"{checkpoint}: {name} is not written ({text:.200})", stacklevel=2)
    return {}


def adapter_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and switches of PEFT's settings of an adapter, such as ``lora_alpha``."""
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, (bool, int, float)) and key != "inference_mode"
    }


def _write_adapter(model: nn.Module, checkpoint: Path, adapter: tuple[str, Any]) -> dict[str, int]:
    from peft import get_peft_model_state_dict

    name, config = adapter
    weights = open_weights(checkpoint)
    names = get_peft_model_state_dict(
        model, state_dict={key: key for key in weights.shapes}, adapter_name=name
    )
    config.save_pretrained(checkpoint)
    file, tensors = _ADAPTER, {key: weights.read(found) for key, found in names.items()}
    return {file: write_weights(checkpoint / file, tensors)}
