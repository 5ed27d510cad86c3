"""What every benchmark says first: machine and versions."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from optsched.solving.limits import available_cores


def machine(*packages: str) -> str:
    """Cores, processor, Python and package versions, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("optsched", *packages))
    return f"# {hardware()}, Python {platform.python_version()}, {versions}"


def hardware() -> str:
    """Cores that this process may use, and the processor's name."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux
    return f"{available_cores()} cores, {name}"
