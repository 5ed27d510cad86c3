"""Ctrl-C during a run: once lets every job end its iteration, twice ends the program as usual."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def on_first_interrupt(note: Callable[[], object]) -> Iterator[None]:
    """Call `note` at the first Ctrl-C; another one, a second later, raises `KeyboardInterrupt`.

    Outside of the main thread, where Python takes no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    first = math.inf

    def once(number: int, frame: Any) -> None:
        nonlocal first
        if first == math.inf:
            first = time.monotonic()
            note()
        elif time.monotonic() - first > 1.0:  # torchrun passes on what the terminal has sent too
            signal.signal(signal.SIGINT, before)
            signal.default_int_handler(number, frame)

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is once:
            signal.signal(signal.SIGINT, before)
