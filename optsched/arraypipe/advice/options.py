"""`Option` and `Advice`: what `advise` answers, and how people read it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from optsched.io.text import bytes_text

if TYPE_CHECKING:
    from optsched.problems.jobarray.reports import ServerPrefetch


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
        Per round of all jobs; None if it is impossible or was not computed.
    reason
        Where the time comes from; or why not, with the device, its bytes, and what would help.
    fits
        Whether the memory suffices; None if that is not known.
    needed
        Bytes of the fullest device; None if not computed.
    spread
        Seconds by which the time may be off: the profile's IQR over its median, times `seconds`.
    unsure
        ``">="`` if `seconds` is only a lower bound, ``"~"`` if it rests on something that was not
        measured. Such an option is never the best one.
    """

    name: str
    seconds: float | None
    reason: str
    fits: bool | None = None
    needed: int | None = None
    spread: float = 0.0
    unsure: str = ""

    @property
    def counts(self) -> bool:
        """Whether its time can be compared."""
        return self.seconds is not None and self.fits is not False and not self.unsure

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name, "seconds": self.seconds, "fits": self.fits, "needed": self.needed,
            "spread": self.spread, "unsure": self.unsure, "reason": self.reason,
        }  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """Options to train jobs on devices, the fastest first; `print` shows them as a table.

    Parameters
    ----------
    options
        By time; then those of unsure times, then those that are impossible or not computed.
    jobs, devices, memory
        What was asked: number of jobs and devices, bytes of a device (0 = not known).
    iterations
        Of every job in a round.
    prefetch
        Whether every device could load a job's state behind any block of another
        (`JobArray.prefetch_ok`): times alone, never a constraint.
    notes
        What the numbers rest on.
    """

    options: tuple[Option, ...]
    jobs: int
    devices: int
    memory: int
    iterations: tuple[int, ...]
    prefetch: tuple[ServerPrefetch, ...] = ()
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
        return next((option for option in self.options if option.counts), None)

    @property
    def close(self) -> tuple[Option, ...]:
        """Options so near to the best one that it does not count.

        Either the profile's IQR covers the difference, or it is below half a percent.
        """
        first = self.best
        if first is None:
            return ()
        return tuple(
            option
            for option in self.options
            if option.counts
            and option is not first
            and _lead(first, option)
            <= max(first.spread, option.spread, _TIE * (first.seconds or 0.0))
        )

    @property
    def too_close(self) -> bool:
        """Whether there are options as good as the best one (`close`)."""
        return bool(self.close)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        best = self.best
        if best is None:
            return "nothing of this is possible; see what would help"
        names = ", ".join(option.name for option in self.close)
        text = f"best: {best.name}"
        second = next((o for o in self.options if o.counts and o is not best), None)
        if names:
            text = f"too close to call: {best.name} leads {names}"
            text += " by no more than the IQR or half a percent"
        elif second is not None and best.seconds:
            assert second.seconds is not None
            text += f", {second.seconds / best.seconds:.2f}x as fast as {second.name}"
        assert best.seconds is not None
        for option in self.options:
            if option.unsure and option.seconds is not None and option.seconds < best.seconds:
                text += f"; {option.name} could be faster, but that was not measured"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = self.best
        return {
            "best": None if best is None else best.name,
            "too_close": self.too_close,
            "verdict": self.verdict,
            "jobs": self.jobs, "devices": self.devices, "memory": self.memory,
            "iterations": list(self.iterations),
            "options": [option.as_dict() for option in self.options],
            "prefetch": [
                {"device": p.server, "load_ns": p.load, "window_ns": p.window, "ok": p.ok}
                for p in self.prefetch
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        memory = bytes_text(self.memory) if self.memory else "unknown memory"
        once = set(self.iterations) == {1}
        what = "one iteration of every job" if once else f"{sum(self.iterations)} iterations"
        lines = [
            f"{self.jobs} job{'s' * (self.jobs != 1)} on {self.devices} "
            f"device{'s' * (self.devices != 1)} of {memory}; a round is {what}",
            "",
        ]
        width = max(len(option.name) for option in self.options)
        lines.append(f"{'':{width}}  {'s / round':>11}  {'memory':>10}  why")
        for option in self.options:
            lines += _row(option, width)
        lines += ["", self.verdict]
        if self.prefetch:
            lines += ["", *_prefetch(self.prefetch)]
        lines += [line for note in self.notes for line in _wrapped(f"note: {note}", "  ")]
        return "\n".join(lines)


def _lead(first: Option, second: Option) -> float:
    assert first.seconds is not None
    assert second.seconds is not None
    return second.seconds - first.seconds


def _row(option: Option, width: int) -> list[str]:
    """A line of the table; its reason goes on below."""
    time = "-"
    if option.seconds is not None:
        time = f"{option.unsure} {option.seconds:.4g}".strip()
    room = "-" if option.needed is None else bytes_text(option.needed)
    lead = f"{option.name:{width}}  {time:>11}  {room:>10}  "
    return textwrap.wrap(
        option.reason, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)
    )


def _prefetch(found: tuple[ServerPrefetch, ...]) -> list[str]:
    """Eq. 2 of the paper, device by device."""
    bad = [p for p in found if not p.ok]
    if not bad:
        return ["states can be loaded from the host behind any block, on every device"]
    worst = min(bad, key=lambda p: p.slack)
    return _wrapped(
        f"{len(bad)} of {len(found)} devices cannot load a job's state from the host behind every "
        f"block: {worst.server} needs {worst.load / 1e6:.4g} ms, its shortest block leaves "
        f"{max(0, worst.window) / 1e6:.4g} ms (matters only if states do not stay on the devices)",
        "  ",
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent)
