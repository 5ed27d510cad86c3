"""Random states, default type, modes and GPU of the process: a run leaves them as they were."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


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
