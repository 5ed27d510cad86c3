"""A Gantt chart in letters, for a terminal: who runs where."""

from __future__ import annotations

from string import ascii_lowercase
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.text import plain, time_text

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


_OTHER: Final = {"R": "~", "U": "+"}


def gantt_text(schedule: Schedule, begin: int, end: int, width: int = 88) -> str:
    """One line per resource from `begin` to `end`, in the schedule's unit.

    Small letters are forward blocks of jobs a, b, c, ..., capital ones backward blocks, ``~``
    recomputes, ``+`` updates, dots idle time. Every column shows what takes most of its time.

    Raises
    ------
    InputError
        There are no starts, or no time between `begin` and `end`.
    """
    if schedule.start is None:
        raise InputError("this graph is not scheduled: there is nothing to draw")
    if not begin < end:
        raise InputError(f"end: expected more than {begin}, got {end}")
    names = [plain(resource.name, 16) for resource in schedule.resources]
    room = max(map(len, names), default=0)
    step = (end - begin) / width
    lines = [
        f"{name:{room}} |{''.join(row)}|"
        for name, row in zip(names, _rows(schedule, begin, step, width), strict=True)
    ]
    span = time_text(end - begin, schedule.time_unit)
    lines.append(f"{'':{room}}  {span} of it; a forward, A backward of job 0, b of job 1, ...")
    return "\n".join(lines)


def _rows(schedule: Schedule, begin: int, step: float, width: int) -> list[list[str]]:
    rows = [["."] * width for _ in schedule.resources]
    most = [[step / 2] * width for _ in schedule.resources]  # idle where nothing fills half of it
    assert schedule.start is not None
    start, finish = schedule.start.tolist(), schedule.end.tolist()
    kind, job = schedule.kind.tolist(), schedule.job.tolist()
    for i, resources in enumerate(schedule.op_resources.to_lists()):
        first = max(0, int((start[i] - begin) // step))
        last = min(width - 1, int((finish[i] - begin) // step))
        for column in range(first, last + 1):
            left = begin + column * step
            share = min(finish[i], left + step) - max(start[i], left)
            for r in resources:
                if share >= most[r][column]:
                    most[r][column] = share
                    rows[r][column] = _letter(kind[i], job[i])
    return rows


def _letter(kind: str, job: int) -> str:
    letter = ascii_lowercase[job % len(ascii_lowercase)]
    return letter.upper() if kind == "B" else _OTHER.get(kind, letter)
