"""A number on its way from a GPU to the host: read when it is there, not waited for earlier."""

from __future__ import annotations

import torch
from torch import Tensor


class Late:
    """The value of a tensor with one element, copied behind what its stream has been given so far.

    Reading it waits for that alone, on whichever stream and at whatever time it is read.

    Parameters
    ----------
    value
        On a GPU, made on its current stream.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = page_locked_like(value)
        self.value.copy_(value.detach(), non_blocking=True)
        self.there = torch.cuda.current_stream(value.device).record_event()

    def item(self) -> float:
        """The number."""
        self.there.synchronize()
        return float(self.value.item())


def page_locked_like(value: Tensor) -> Tensor:
    """Host memory for a tensor, with its strides; a copy to any other would make the host wait.

    Raises
    ------
    torch.OutOfMemoryError
        There is not so much, which a GPU is none the worse for.
    """
    try:
        return torch.empty_like(value, device="cpu", pin_memory=True)
    except RuntimeError as error:  # torch takes it for an error of the GPU
        if "out of memory" not in str(error).lower():
            raise
        size = value.numel() * value.element_size()
        raise torch.OutOfMemoryError(f"the host cannot page-lock {size} bytes") from error
