"""A real process of the service: disconnects, signals, hostile HTTP, its OpenAPI page."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import test_service
from test_service import until

from benchmarks.service.server import Service, service
from optsched.problems.jobshop import generator
from optsched.problems.jobshop.document import to_json
from optsched.service.queries import QUERIES

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOP = json.loads(to_json(generator.generate(20, 20, 1, 2)))


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    """A service with one worker."""
    with service("--workers", "1", "--timeout", "20") as found:
        yield found


def client(running: Service) -> Any:
    """A client of a service."""
    return httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=30)


def metric(running: Service, name: str) -> float:
    """The value of a line of /v1/metrics."""
    with client(running) as found:
        return test_service.metric(found, name)


def raw(running: Service, data: bytes) -> bytes:
    """Send bytes and return what comes back until the connection is closed, or nothing comes."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=1) as link:
        link.sendall(data)
        found = b""
        with suppress(TimeoutError, ConnectionResetError):
            while block := link.recv(65536):
                found += block
        return found


def post(body: Any, path: str = "/v1/solve") -> bytes:
    """A request as bytes."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def test_a_client_that_disconnects_stops_its_work(running: Service) -> None:
    """The worker is free again long before the time limit."""
    with socket.create_connection(("127.0.0.1", running.port)) as link:
        link.sendall(post({"problem": SHOP, "time_limit": 15}))
        until(lambda: metric(running, "optsched_workers_busy") == 1)
    lost = 'optsched_workers_lost_total{why="disconnect"}'
    until(lambda: metric(running, lost) == 1)
    with client(running) as found:
        assert found.post("/v1/clear", json=QUERIES["clear"].example).status_code == 200


def test_wrong_http_is_refused(running: Service) -> None:
    """And the service goes on."""
    long = b"GET /v1/health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"
    for data in (b"\r\n\r\n", b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", long,
                 b"POST /v1/choose HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
                 b"POST /v1/choose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n"
                 b"Content-Type: application/json\r\n\r\n"):  # fmt: skip
        found = raw(running, data)
        assert not found or found.split()[1][:1] == b"4", (data[:60], found[:200])
    with client(running) as found:
        assert found.get("/v1/health").status_code == 200


@pytest.mark.slow
def test_workers_end_with_a_killed_service() -> None:
    """They read the end of their input."""
    with pytest.raises(AssertionError, match="-9"), service("--workers", "1") as running:
        children = [one for one in running.memory() if one != running.process.pid]
        assert children
        running.process.kill()
        until(lambda: not any(map(alive, children)))


def refuses(running: Service) -> bool:
    """Whether new connections are refused."""
    try:
        socket.create_connection(("127.0.0.1", running.port), timeout=1).close()
    except OSError:
        return True
    return False


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "give a token"),
        (["--port", "70000"], "port: expected"),
        (["--workers", "0"], "workers: expected"),
        (["--token-file", "nosuch"], "no such file"),
        (["--host", "203.0.113.7", "--token-file", "token"], "cannot be used"),
    ],
)
def test_wrong_options_are_refused_in_a_line(options: list[str], message: str, cli: Any) -> None:
    """Exit code 2, no traceback."""
    with open("token", "w") as file:
        file.write("0123456789abcdefghij")
    done = cli("serve", *options)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert "0123456789" not in done.err


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(running: Service) -> None:
    """Requests made from the OpenAPI page; answers keep their schemas and content types."""
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,"
    checks += "response_schema_conformance"
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", "--checks", checks,
         "--max-examples", "50", "--request-timeout", "60", "--exclude-path", "/v1/metrics",
         f"http://127.0.0.1:{running.port}/v1/openapi.json"],
        capture_output=True, text=True, timeout=900, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_sigterm_finishes_what_is_in_flight(running: Service) -> None:
    """It is answered, new connections are refused, no process is left, and the exit code is 0."""
    children = [one for one in running.memory() if one != running.process.pid]
    with socket.create_connection(("127.0.0.1", running.port)) as link:
        link.sendall(post({"problem": SHOP, "time_limit": 2}))
        until(lambda: metric(running, "optsched_workers_busy") == 1)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(running))
        link.settimeout(30)
        assert link.recv(20).startswith(b"HTTP/1.1 200 OK")
    assert running.process.wait(30) == 0
    until(lambda: not any(map(alive, children)))
