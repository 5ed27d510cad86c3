"""On which device every virtual stage is: wrapped around the devices, or in a zigzag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.pipelines.fixed_order import check_array
from optsched.problems.jobarray.checks import MAX_BLOCKS, flat

if TYPE_CHECKING:
    from optsched.problems.jobarray.problem import JobArray


def wrapped(devices: int, chunks: int = 2) -> tuple[int, ...]:
    """Stage v on device v mod S: what `interleaved` needs.

    Parameters
    ----------
    devices
        Number of devices S.
    chunks
        Stages of every device.

    Returns
    -------
    tuple of int, length devices * chunks
        For `JobArray(place=...)` and `JobArray.from_profile(place=...)`.
    """
    _check(devices, chunks)
    return (*range(devices),) * chunks


def zigzag(devices: int, chunks: int = 2) -> tuple[int, ...]:
    """Down the devices and up again, ``chunks / 2`` times (waves): what `hanayo` needs.

    Parameters
    ----------
    devices
        Number of devices S.
    chunks
        Stages of every device, an even number: two a wave.

    Returns
    -------
    tuple of int, length devices * chunks
        Such as ``(0, 1, 2, 2, 1, 0)``.
    """
    _check(devices, chunks)
    if chunks % 2:
        raise InputError(f"chunks: a wave has two, expected an even number, got {chunks}")
    return (*range(devices), *reversed(range(devices))) * (chunks // 2)


def chunks_of(job: JobArray, name: str) -> tuple[int, int]:
    """Devices and stages a device of a job that is placed as `wrapped` or `zigzag` say.

    Raises
    ------
    InputError
        It is not, or the job is no `JobArray`; says which place to give.
    """
    check_array(job, name)
    layout = {"interleaved": wrapped, "hanayo": zigzag}[name]
    devices = 1 + max(flat(job.place))
    chunks = job.n_stages // devices
    fits = chunks * devices == job.n_stages and (layout is wrapped or chunks % 2 == 0)
    if not fits or job.place != layout(devices, chunks):
        raise InputError(
            f"{name}: needs several stages a device, give "
            f"place={layout.__name__}(devices, chunks) of optsched.pipelines"
        )
    return devices, chunks


def _check(devices: int, chunks: int) -> None:
    integer("devices", devices, 1, MAX_BLOCKS)
    integer("chunks", chunks, 1, MAX_BLOCKS // devices)
