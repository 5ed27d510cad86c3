"""A traced model must give the bits of the model itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optsched.arraypipe.attributes import attributes_kept
from optsched.arraypipe.job import buffer_holders, seed_generator
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def compare(
    model: nn.Module,
    stages: Sequence[nn.Module],
    points: Sequence[str],
    sample: Any,
    sentence: str = "",
) -> None:
    """Run the model and its stages on a sample, with the same random numbers.

    Finds what tracing does not see, such as ``isinstance(x, Tensor)`` or ``x is None``.

    Parameters
    ----------
    points
        First module of the second, third, ... stage.
    sentence
        Of the error; by default it is about a traced model.

    Raises
    ------
    InputError
        The outputs differ.
    """
    whole = _flat(_run_whole(model, points, sample))
    parts = _flat(_run_stages(model, stages, sample))
    if len(whole) != len(parts) or not all(map(_same, whole, parts)):
        raise InputError(
            sentence
            or f"stages: {type(model).__name__}, traced and cut, gives other values than by "
            f"itself: its forward does something that tracing does not see (isinstance, `is None`, "
            f"a value of the data, a view changed in place after a cut); name the modules of every "
            f"stage instead, or let build_model return an nn.Sequential or a list of stages"
        )


def runs(model: nn.Module, sample: Any) -> bool:
    """Whether the model itself can be called with a sample."""
    try:
        _run_whole(model, [], sample)
    except Exception:
        return False
    return True


def _run_whole(model: nn.Module, points: Sequence[str], sample: Any) -> Any:
    def reseed(stage: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, arguments: seed_generator(stage, torch.device("cpu"))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(reseed(stage))
        for stage, name in enumerate(["", *points])
    ]
    try:
        with _copies_of_buffers(model), attributes_kept([model]):
            return model(_copied(sample))
    finally:
        for handle in handles:
            handle.remove()


def _run_stages(model: nn.Module, stages: Sequence[nn.Module], sample: Any) -> Any:
    x = _copied(sample)
    with _copies_of_buffers(model), attributes_kept([model]):
        for s, stage in enumerate(stages):
            seed_generator(s, torch.device("cpu"))
            x = _copied(stage(x)) if s + 1 < len(stages) else stage(x)  # as if sent
    return x


@contextmanager
def _copies_of_buffers(model: nn.Module) -> Iterator[None]:
    """Let a forward change copies of the buffers."""
    places = [(module._buffers, name) for module, name in buffer_holders([model])]
    own = [buffers[name] for buffers, name in places]
    for (buffers, name), buffer in zip(places, own, strict=True):
        assert buffer is not None
        buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for (buffers, name), buffer in zip(places, own, strict=True):
            buffers[name] = buffer


def _copied(sample: Any) -> Any:
    return tuple(t.clone() for t in sample) if isinstance(sample, tuple) else sample.clone()


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # not a number is the same as itself


def _flat(value: Any) -> list[Any]:
    """Tensors and numbers of an output, in order."""
    if isinstance(value, dict):
        return [entry for inner in value.values() for entry in _flat(inner)]
    if isinstance(value, (list, tuple)):
        return [entry for inner in value for entry in _flat(inner)]
    return [value]
