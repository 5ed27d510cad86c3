"""Address, token and limits of a service."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.values import integer, label, number
from optsched.solving.limits import available_cores

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE: Final = "OPTSCHED_TOKEN"
"""Environment variable with the token."""

LEAST_TOKEN: Final = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service listens and what it accepts.

    Parameters
    ----------
    host, port
        Address; hosts other than the loopback interface need a token.
    token
        Secret that requests send as ``Authorization: Bearer``; None: none is needed.
    workers
        Processes for long requests [default: the cores].
    timeout
        Seconds for one request.
    max_body
        Bytes of a body.
    in_flight
        Requests that are answered or queued at once; more are refused by 503.
    queue
        Long requests that may queue for a worker.
    quick_body
        Bytes of a body up to which small decisions are answered without a worker.

    Raises
    ------
    InputError
        A value is out of range, or the address needs a token.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = field(default=None, repr=False)
    workers: int = field(default_factory=available_cores)
    timeout: float = 60.0
    max_body: int = 16 << 20
    in_flight: int = 256
    queue: int = 64
    quick_body: int = 32 << 10

    def __post_init__(self) -> None:
        label("host", self.host)
        integer("port", self.port, 0, 65_535)
        integer("workers", self.workers, 1, 1024)
        number("timeout", self.timeout, 0.1, 86_400)
        integer("max_body", self.max_body, 1024, 1 << 30)
        integer("in_flight", self.in_flight, 1, 100_000)
        integer("queue", self.queue, 0, 100_000)
        integer("quick_body", self.quick_body, 0, 1 << 20)
        if self.token is not None and not _is_token(self.token):
            raise InputError(
                f"token: expected {LEAST_TOKEN} to 1000 visible ASCII characters without spaces"
            )
        if self.token is None and not is_loopback(self.host):
            raise InputError(
                f"host: {self.host!r:.60} is reachable from other machines: give a token "
                f"(--token-file or {VARIABLE}), or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: Path | None) -> str | None:
    """Return the token of a file, else of the environment, else None."""
    if file is not None:
        return read_text(file).strip()
    return os.environ.get(VARIABLE) or None


def _is_token(token: str) -> bool:
    return LEAST_TOKEN <= len(token) <= 1000 and all("!" <= c <= "~" for c in token)
