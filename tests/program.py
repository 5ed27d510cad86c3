"""The command line as tests run it: in this process, or in one of its own."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import typer.main

from optsched.cli import main

if TYPE_CHECKING:
    from pathlib import Path

BAD = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)),
    "truncated": b'{"format": "optsched.schedule/1", "resources": [',
    "newer": b'{"format": "optsched.schedule/2"}',
    "nan": b'{"format": "optsched.schedule/1", "resources": NaN}',
    "cycle": b'{"format": "optsched.schedule/1", "resources": [], "operations":'
    b'[{"duration": 1}, {"duration": 1}], "arcs": [[0, 1], [1, 0]]}',
    "surrogate": b'{"format": "optsched.schedule/1", "name": "\\ud800"}',
    "escape codes": b'{"format": "\\u001b[2J\\n\\u202e"}',
    "garbage": b"\x7f" * 1_000_000,
}
"""What no command can read, by its name; None: there is no such file."""

SHOP = "3 3\n0 3 1 2 2 2\n0 2 2 1 1 4\n1 4 2 3 0 1\n"
PATIENCE = 300
"""Seconds for a process that is told to end: many times more than it needs."""

PROGRAM = [sys.executable, "-c", "from optsched.cli import main; main()"]


# the tree of commands is made once, not for every command that is run in this process
typer.main.get_command = functools.cache(typer.main.get_command)


class Ran(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str


class Cli:
    """Runs commands in this process, in a folder of their own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: Any) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture

    def __call__(self, *words: object) -> Ran:
        """Run one command."""
        self.patch.setattr(sys, "argv", ["optsched", *map(str, words)])
        self.capture.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        out, err = self.capture.readouterr()
        assert "Traceback" not in out + err
        return Ran(done.value.code, out, err)

    def feed(self, data: str | bytes) -> None:
        """What stdin holds."""
        content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        self.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    def _there(self) -> set[str]:
        return {*os.listdir(self.folder)} - {"__pycache__"}  # of scripts that are read

    def refused(self, *words: object, code: int = 2) -> str:
        """The one line on stderr of a command that must fail and leave no file behind."""
        before = self._there()
        ran = self(*words)
        assert ran.code == code, ran
        assert ran.out == ""
        assert ran.err.count("\n") == 1 and ran.err.startswith("error: "), ran.err
        assert self._there() == before
        return ran.err.removeprefix("error: ").rstrip("\n")


def start(*words: object, **rest: Any) -> subprocess.Popen[str]:
    """The program as a process."""
    return subprocess.Popen(
        [*PROGRAM, *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **rest,
    )  # fmt: skip
