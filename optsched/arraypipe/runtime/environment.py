"""Devices of a schedule, what a run changes in its process and puts back, Ctrl-C."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SETTINGS: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""A queue for every stream, and no loading of kernels that waits for those that run."""


def set_queues() -> None:
    """Settings of a process that has a GPU of its own; those that are set already stay."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.update(SETTINGS | os.environ)


if "RANK" in os.environ:  # of `torchrun`: here, because already to ask for GPUs starts CUDA
    set_queues()


def is_follower() -> bool:
    """Whether this process is a rank, and not the first."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() > 0
    return os.environ.get("RANK", "0") != "0"


def on_gpu(device: torch.device) -> bool:
    """Whether what a device is given runs later, in streams."""
    return device.type == "cuda"


def check_devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    """Refuse what cannot be the devices of a trainer anywhere; whether they exist a run sees."""
    if devices is None:
        return []
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise InputError(
            f"devices: expected a list, one for every device of the schedule (they may repeat), "
            f"got {devices!r:.60}; e.g. devices=['cuda:0', 'cuda:1']"
        )
    if not devices:
        raise InputError("devices: expected at least one, got none")
    found = []
    for k, given in enumerate(devices):
        try:
            found.append(torch.device(given))
        except (RuntimeError, TypeError) as error:
            raise InputError(f"devices[{k}]: {given!r} is no torch device") from error
        if found[-1].type not in ("cpu", "cuda"):
            raise InputError(f"devices[{k}]: expected cpu or cuda, got {given!r}")
    if len({device.type for device in found}) > 1:
        raise InputError("devices: expected all on the CPU or all on GPUs, got both")
    return found


def resolve(
    devices: Sequence[str | torch.device] | None, names: Sequence[str] | None = None
) -> tuple[torch.device, ...]:
    """The torch device of every device of a schedule in this process: one GPU, or the CPU.

    None: the first GPU of the host, else the CPU. `names` are those of the schedule's devices;
    without them there is no schedule yet, and all of the host are given.
    """
    n = 1 if names is None else len(names)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = check_devices(devices)
    if devices is None and (count < 2 or names is not None):
        return (torch.device("cuda:0" if count else "cpu"),) * n
    if devices is None:
        found = [torch.device("cuda", k) for k in range(count)]
    for k, device in enumerate(found):
        if device.type == "cuda":
            found[k] = torch.device("cuda", device.index or 0)
            if found[k].index >= count:
                raise InputError(
                    f"devices[{k}]: there is no {found[k]}; this host has {count} GPUs"
                )
    if names is None:
        return tuple(found)
    if len(set(found)) > 1:
        raise InputError(
            f"devices: a process trains on one device, got {', '.join(map(str, found))}; for "
            f"several GPUs start a process for each (torchrun --nproc-per-node {len(found)} ...)"
        )
    if len(found) < n:
        raise InputError(
            f"devices: the schedule has {n} ({', '.join(names)}), there are {len(found)}; name one "
            f"for each, they may repeat: devices={[str(d) for d in found]} + [...]"
        )
    return tuple(found[:n])


def own_first(devices: tuple[torch.device, ...]) -> tuple[torch.device, ...]:
    """The same, from that of LOCAL_RANK on: processes of one host measure each on its own."""
    own = int(os.environ.get("LOCAL_RANK", "0")) % len(devices)
    return devices[own:] + devices[:own]


def deterministic(devices: Sequence[torch.device]) -> None:
    """Refuse settings with which a GPU does not give the same bits twice, and warn of others."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not gpus:
        return
    if torch.backends.cudnn.benchmark:
        raise InputError(
            "torch.backends.cudnn.benchmark is on: kernels would be chosen by time; switch it off"
        )
    if not torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            "some kernels of GPUs add in any order, so that a job may end with other bits than "
            "alone; for the same ones call torch.use_deterministic_algorithms(True) and set "
            "torch.utils.deterministic.fill_uninitialized_memory = False",
            stacklevel=2,
        )
    kinds = _kinds(gpus)
    if len(kinds) > 1:
        warnings.warn(
            f"devices: GPUs of several kinds ({', '.join(kinds)}) choose other kernels "
            "and draw other random numbers; a job alone on one of them may end with other bits",
            stacklevel=2,
        )


def gpu_settings(devices: Sequence[torch.device]) -> dict[str, Any]:
    """What the bits of GPUs depend on beside the program, for the record; empty on CPUs."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not gpus:
        return {}
    matmul = torch.backends.cuda.matmul
    legacy = not hasattr(matmul, "fp32_precision")  # before torch 2.9; later one may raise
    return {
        "gpus": _kinds(gpus),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_tf32": matmul.allow_tf32 if legacy else matmul.fp32_precision == "tf32",
    }


def _kinds(gpus: Sequence[torch.device]) -> list[str]:
    return sorted({torch.cuda.get_device_properties(device).name for device in gpus})


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Gradients on; afterwards random states, default type, modes and GPU are as before."""
    generator, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    dtype = torch.get_default_dtype()
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if begun else []
    gpu = torch.cuda.current_device() if begun else -1
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        if begun and torch.cuda.current_device() != gpu:  # else it would make a context on GPU 0
            torch.cuda.set_device(gpu)
        torch.set_rng_state(generator)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_default_dtype(dtype)


@contextmanager
def on_first_interrupt(note: Callable[[], object]) -> Iterator[None]:
    """Call `note` at the first Ctrl-C; another one, a second later, raises `KeyboardInterrupt`.

    Outside of the main thread, where Python takes no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    first = math.inf

    def once(number: int, frame: Any) -> None:
        nonlocal first
        if first == math.inf:
            first = time.monotonic()
            note()
        elif time.monotonic() - first > 1.0:  # torchrun passes on what the terminal has sent too
            signal.signal(signal.SIGINT, before)
            signal.default_int_handler(number, frame)

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is once:
            signal.signal(signal.SIGINT, before)
