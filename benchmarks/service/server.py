"""A service in a process, and connections to it, for benchmarks and tests of this machine only."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [sys.executable, "-c", "from optsched.cli import main; main()", "serve", "--port", "0"]


class Service(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    port: int

    def cpu(self) -> float:
        """Processor time of the process that answers small decisions, in seconds."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            ticks = file.read().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[int, int]:
        """Resident kilobytes of the process and its children, by process."""
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            pids = [pid, *map(int, file.read().split())]
        found = {}
        for one in pids:
            with open(f"/proc/{one}/status") as file:
                line = next(line for line in file if line.startswith("VmRSS"))
            found[one] = int(line.split()[1])
        return found


@contextmanager
def service(*options: str) -> Iterator[Service]:
    """Start a service on a free port of the loopback interface; stop it by SIGTERM."""
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        yield Service(process, int(line.split()[2].rpartition(":")[2]))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(90)
        assert code == 0, code


class Connection:
    """A connection that is kept alive, for one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> None:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        top = await self.reader.readuntil(b"\r\n\r\n")
        lines = top.lower().split(b"\r\n")
        length = next(int(one[15:]) for one in lines if one.startswith(b"content-length:"))
        return int(lines[0].split()[1]), await self.reader.readexactly(length)
