"""Address, token and limits of a service."""

from __future__ import annotations

import ipaddress
import os
import re
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

_RANGES: Final = {
    "port": (0, 65_535), "workers": (1, 1024), "max_body": (1024, 1 << 30),
    "in_flight": (1, 100_000), "queue": (0, 100_000), "quick_body": (0, 1 << 20),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service listens and what it accepts."""

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = field(default=None, repr=False)
    """Secret that requests send as ``Authorization: Bearer``; hosts beyond loopback need one."""
    workers: int = field(default_factory=available_cores)
    """Processes for long requests."""
    timeout: float = 60.0
    """Seconds for one request."""
    max_body: int = 16 << 20
    """Bytes of a body."""
    in_flight: int = 256
    """Requests that are answered or queued at once; more are refused by 503."""
    queue: int = 64
    """Long requests that may queue for a worker."""
    quick_body: int = 32 << 10
    """Bytes of a body up to which small decisions are answered without a worker."""

    def __post_init__(self) -> None:
        label("host", self.host)
        number("timeout", self.timeout, 0.1, 86_400)
        for name, (least, most) in _RANGES.items():
            integer(name, getattr(self, name), least, most)
        if self.token is not None and not re.fullmatch("[!-~]{16,1000}", self.token):
            raise InputError("token: expected 16 to 1000 visible ASCII characters without spaces")
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
