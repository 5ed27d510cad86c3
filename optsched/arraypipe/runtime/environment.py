"""Devices of a schedule, what a run changes in its process and puts back, Ctrl-C."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def on_gpu(device: torch.device) -> bool:
    """Return whether what a device is given runs later, in streams."""
    return device.type == "cuda"


def device_of(given: str | torch.device | None) -> torch.device:
    """Return the device of this process; None: its GPU by LOCAL_RANK if there is one, else CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(given or ("cuda" if count else "cpu"))
    if device.type != "cuda":
        return device
    index = device.index
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, count)
    if index >= count:
        raise InputError(f"device: cuda:{index} does not exist; this host has {count} GPUs")
    return torch.device("cuda", index)


def deterministic(device: torch.device) -> None:
    """Refuse settings with which a GPU does not give the same bits twice, and warn of others."""
    if device.type != "cuda":
        return
    if torch.backends.cudnn.benchmark:
        raise InputError(
            "torch.backends.cudnn.benchmark is on: kernels would be chosen by time; switch it off"
        )
    if not torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            "some kernels of GPUs add in any order, so that a job may end with other bits than "
            "alone; for equal bits call torch.use_deterministic_algorithms(True) and set "
            "torch.utils.deterministic.fill_uninitialized_memory = False",
            stacklevel=2,
        )


def gpu_settings(device: torch.device) -> dict[str, Any]:
    """What the bits of a GPU depend on beside the program, for the record; empty on a CPU."""
    if device.type != "cuda":
        return {}
    matmul = torch.backends.cuda.matmul
    legacy = not hasattr(matmul, "fp32_precision")  # before torch 2.9; later one may raise
    return {
        "gpus": [torch.cuda.get_device_properties(device).name],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_tf32": matmul.allow_tf32 if legacy else matmul.fp32_precision == "tf32",
    }


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
    """Call `note` at the first Ctrl-C; another one, a second later, raises `KeyboardInterrupt`."""
    before, first = signal.getsignal(signal.SIGINT), math.inf

    def once(number: int, frame: Any) -> None:
        nonlocal first
        if first == math.inf:
            first = time.monotonic()
            note()
        elif time.monotonic() - first > 1.0:  # torchrun passes on what the terminal has sent too
            signal.signal(signal.SIGINT, before)
            signal.default_int_handler(number, frame)

    main = threading.current_thread() is threading.main_thread()
    if main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is once:
            signal.signal(signal.SIGINT, before)
