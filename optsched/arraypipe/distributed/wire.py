"""Copies of tensors that keep strides and alignment, on which the bits of kernels may depend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 256  # cuBLASLt looks at up to so many bytes
_OF_HOST: Final = 64  # where torch's memory begins on a CPU


def shift_of(t: Tensor) -> int:
    """Bytes from where memory of the device may begin to the tensor; 0 unless it is a slice."""
    shift = t.data_ptr() % (ALIGNMENT if t.is_cuda else _OF_HOST)
    return shift - shift % t.dtype.itemsize


def copied(t: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, with the strides of a slice; overlapping elements are spread out."""
    trained, t = t.requires_grad, t.detach()
    plain = t.layout != torch.strided or not t.numel()
    if not plain:
        span, step = 1, 1
        for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
            plain |= n > 1 and stride < step
            span, step = span + (n - 1) * stride, max(step, stride * n)
    if plain:
        return t.to(device, non_blocking=True, copy=True).requires_grad_(trained)
    begin = shift_of(t) // t.dtype.itemsize
    made = torch.empty(begin + span, dtype=t.dtype, device=device)
    made = made.as_strided(t.shape, t.stride(), begin)
    return made.copy_(t, non_blocking=True).requires_grad_(trained)
