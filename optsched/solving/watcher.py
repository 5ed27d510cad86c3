"""Base class for those who watch a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optsched.solving.monitor import Progress
    from optsched.solving.problem import Problem
    from optsched.solving.result import Result


class Watcher:
    """Override what is of interest and pass an object as ``optsched.solve(..., watcher=...)``.

    Every method is called from the thread that called `optsched.solve`. All but `on_end` stop the
    search by returning true; an exception stops it too, and comes out of `optsched.solve` with the
    best so far in its ``.result``. A method that takes long delays only its own thread.
    """

    def on_start(self, problem: Problem) -> object:
        """The arguments are in order; nothing is computed yet."""

    def on_incumbent(self, progress: Progress) -> object:
        """A better schedule was found; at once, and none is left out."""

    def on_bound(self, progress: Progress) -> object:
        """A higher lower bound was proved; at most 20 times a second, and none is left out."""

    def on_restart(self, progress: Progress) -> object:
        """An engine (`Progress.source`) started afresh; at most 20 times a second, the last."""

    def on_end(self, result: Result) -> None:
        """The search is over; not called if the call ends with an exception."""
