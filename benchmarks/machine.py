"""The line that every benchmark prints first: machine and versions."""

from __future__ import annotations

import platform
from importlib.metadata import version

from optsched.limits import available_cores


def machine(*packages: str) -> str:
    """Cores, processor, Python and package versions, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("optsched", *packages))
    kind = platform.processor() or platform.machine()
    return f"# {available_cores()} cores, {kind}, Python {platform.python_version()}, {versions}"
