"""`Option` and `Advice`: what `advise` answers, and how people read it."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Final

from optsched.io.text import bytes_text

_WIDTH: Final = 100
_TIE: Final = 0.005
"""Relative lead that no table shows and no profile can tell."""


@dataclass(frozen=True)
class Option:
    """One way to train all jobs.

    Parameters
    ----------
    name
        Such as ``"1F1B"``.
    seconds
        Per round of all jobs; None if it does not fit or was not computed.
    reason
        Where the time comes from; or why not, with the device, its bytes, and what would help.
    fits
        Whether the memory suffices; None if that is not known.
    needed
        Bytes of the fullest device; None if not computed.
    spread
        Seconds by which the time may be off: the profile's IQR over its median, times `seconds`.
    """

    name: str
    seconds: float | None
    reason: str
    fits: bool | None = None
    needed: int | None = None
    spread: float = 0.0


@dataclass(frozen=True)
class Advice:
    """Options to train jobs on devices, the fastest first; `print` shows them as a table.

    Parameters
    ----------
    options
        By time; then those that do not fit or were not computed.
    jobs, devices, memory
        What was asked: number of jobs and devices, bytes of a device (0 = not known).
    iterations
        Of every job in a round.
    notes
        What the numbers rest on.
    """

    options: tuple[Option, ...]
    jobs: int
    devices: int
    memory: int
    iterations: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Option:
        """The option of a name."""
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(name)

    @property
    def best(self) -> Option | None:
        """The option of least time; of equal ones the simplest. None if none is possible."""
        return next((option for option in self.options if option.seconds is not None), None)

    @property
    def close(self) -> tuple[Option, ...]:
        """Options so near to the best one that it does not count.

        Either the profile's IQR covers the difference, or it is below half a percent.
        """
        first = self.best
        if first is None or first.seconds is None:
            return ()
        return tuple(
            option
            for option in self.options
            if option.seconds is not None
            and option is not first
            and option.seconds - first.seconds
            <= max(first.spread, option.spread, _TIE * first.seconds)
        )

    @property
    def too_close(self) -> bool:
        """Whether there are options as good as the best one (`close`)."""
        return bool(self.close)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        times = [(option.seconds, option.name) for option in self.options if option.seconds]
        if not times:
            return "nothing of this is possible; see what would help"
        seconds, name = times[0]
        if self.close:
            near = ", ".join(option.name for option in self.close)
            return (
                f"too close to call: {name} leads {near} by no more than the IQR or half a percent"
            )
        if len(times) > 1:
            return f"best: {name}, {times[1][0] / seconds:.2f}x as fast as {times[1][1]}"
        return f"best: {name}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = self.best
        return {
            "best": None if best is None else best.name,
            "too_close": self.too_close,
            "verdict": self.verdict,
            **asdict(self),
        }

    def __str__(self) -> str:
        memory = bytes_text(self.memory) if self.memory else "unknown memory"
        once = set(self.iterations) == {1}
        what = "one iteration of every job" if once else f"{sum(self.iterations)} iterations"
        width = max(len(option.name) for option in self.options)
        lines = [
            f"{self.jobs} job{'s' * (self.jobs != 1)} on {self.devices} "
            f"device{'s' * (self.devices != 1)} of {memory}; a round is {what}",
            "",
            f"{'':{width}}  {'s / round':>11}  {'memory':>10}  why",
        ]
        for option in self.options:
            time = "-" if option.seconds is None else f"{option.seconds:.4g}"
            room = "-" if option.needed is None else bytes_text(option.needed)
            lead = f"{option.name:{width}}  {time:>11}  {room:>10}  "
            lines += textwrap.wrap(
                option.reason, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)
            )
        lines += ["", self.verdict]
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)
