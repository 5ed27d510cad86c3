"""What ranks do alike: all go on with what each of them has made, or all end with one sentence."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch.distributed as dist

from optsched.arraypipe.ranks.links import PeerLost, Stalled, hearing
from optsched.arraypipe.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")
_PATIENCE: Final = 600.0  # seconds


def together(make: Callable[[], Made], patience: float = _PATIENCE, of_first: bool = False) -> Made:
    """What it makes on this rank, or on the first, before there are links (collective; as `same`).

    Raises
    ------
    Stalled
        Not all ranks have come within `patience` seconds.
    """
    join()
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
    except RuntimeError as error:
        raise Stalled(
            f"not all of the {dist.get_world_size()} ranks have come to this run within "
            f"{patience:.3g} s; one of them may have ended, or raised before it called us"
        ) from error
    try:
        made = same(make, group)
        return everybody(made, group)[0] if of_first else made
    finally:
        dist.destroy_process_group(group)


def same(make: Callable[[], Made], group: Any) -> Made:
    """What it makes; if it raises on some rank, all ranks end with that (collective).

    Raises
    ------
    InputError
        It was refused on some rank; the same sentence everywhere.
    PeerLost
        It has raised something else, but not here.
    """
    made: Made | None = None
    failure: Exception | SystemExit | None = None
    try:
        made = make()
    except (Exception, SystemExit) as error:  # also what would end this process alone
        failure = error
    refused = isinstance(failure, InputError)
    rows = everybody(None if failure is None else (refused, reason(failure)), group)
    said = [(rank, *row) for rank, row in enumerate(rows) if row is not None]
    if not said:
        return cast("Made", made)
    rank, refused, sentence = said[0]
    if failure is not None and not isinstance(failure, InputError):
        raise failure
    if len(said) < len(rows) or len({row[2] for row in said}) > 1:
        sentence = f"rank {rank}: {sentence}"
    raise (InputError if refused else PeerLost)(sentence) from failure


def everybody(own: Made, group: Any) -> list[Made]:
    """What every rank has (collective).

    Raises
    ------
    PeerLost
        A rank has ended.
    """
    rows = [own] * dist.get_world_size()
    with hearing():
        dist.all_gather_object(rows, own, group)
    return rows


def join() -> None:
    """Make the process group of `torchrun`, if nobody has made one.

    Raises
    ------
    InputError
        There is no `torchrun`.
    """
    if not dist.is_available():
        raise InputError("backend: this torch has no torch.distributed; use the inline backend")
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "backend: the process backend needs one process per device; start the script with "
            "torchrun, or call torch.distributed.init_process_group first"
        )
    dist.init_process_group("gloo")
    atexit.register(_leave)  # its threads do not survive the interpreter's end


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
