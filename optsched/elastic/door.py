"""Connections of workers of other hosts: both sides prove that they have the token."""

from __future__ import annotations

import fcntl
import os
import queue
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.errors import InputError
from optsched.io.values import format_value, integer

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN: Final = "OPTSCHED_TOKEN"  # the variable with the token
_LEAST: Final = 16  # characters of a token
_PATIENCE_S: Final = 10  # for an answer before the other side is known
_PAUSE_S: Final = 0.1  # after a connection that could not be accepted
_HANG_UP: Final = getattr(select, "POLLRDHUP", select.POLLHUP) | select.POLLHUP
# seconds and probes after which a host that is silent counts as dead
_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class OpenPool(NamedTuple):
    """Describe a pool of `slots` workers, `remote` of them of hosts that join at `listen`.

    `listen` is ``HOST:PORT``, the address of this host for the others; `token` a secret of at least
    16 characters [default: the variable OPTSCHED_TOKEN].

    Examples
    --------
    >>> optsched.elastic.OpenPool(slots=4, remote=2, listen="10.0.0.1:29400").remote
    2
    """

    slots: int
    remote: int
    listen: str
    token: str | None = None


def address_of(name: str, text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; HOST is no wildcard."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if host in ("", "0.0.0.0", "*") or not port.isdecimal():
        got = format_value(text)
        raise InputError(f"{name}: expected HOST:PORT, as other hosts reach this one, got {got}")
    return host, integer(f"{name}: port", int(port), 1, 65535)


def token_of(token: str | None) -> bytes:
    """Check a token, by default that of the environment."""
    found = os.environ.get(TOKEN, "") if token is None else token
    if not isinstance(found, str) or len(found) < _LEAST:
        raise InputError(
            f"token: set {TOKEN} to the same secret on all hosts, at least {_LEAST} characters, "
            "such as by: openssl rand -hex 16"
        )
    return found.encode()


class Door:
    """Accept workers of other hosts; `arrived` has those that know the token."""

    def __init__(self, pool: OpenPool, folder: str, alarm: Callable[[], object]) -> None:
        self.folder = folder
        self.host, port = address_of("listen", pool.listen)
        self._token, self._alarm = token_of(pool.token), alarm
        self.arrived: queue.SimpleQueue[tuple[Connection, dict[str, Any]]] = queue.SimpleQueue()
        try:
            self._socket = socket.create_server((self.host, port))
        except OSError as error:
            raise InputError(f"listen: {pool.listen}: {error.strerror or error}") from None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more workers."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                given = self._socket.accept()[0]
            except OSError:  # closed, or too many files are open at the moment
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._greet, args=(given,), daemon=True).start()

    def _greet(self, given: socket.socket) -> None:
        connection: Connection | None = None
        try:
            connection = _connection(given)
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            hello = dict(connection.recv())
            _limit(connection, 0)
        except Exception:  # a port scan, a wrong token, a worker that has ended
            (connection or given).close()
            return
        self.arrived.put((connection, hello))
        self._alarm()


def connect(address: tuple[str, int], token: bytes, hello: dict[str, Any]) -> tuple[Any, Any]:
    """Connect to a pool; return the connection and the welcome.

    It is a ConnectionRefusedError if there is no pool (any more), a ConnectionError if the host
    cannot be reached, and an `InputError` if the pool has another token or refuses this worker.
    """
    place = f"{address[0]}:{address[1]}"
    try:
        connection = _connection(socket.create_connection(address, _PATIENCE_S))
    except ConnectionRefusedError:
        raise ConnectionRefusedError(f"{place}: connection refused") from None
    except OSError as error:
        raise ConnectionError(f"{place}: {error.strerror or error}") from None
    try:
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
        connection.send(hello)
        _limit(connection, 0)
        welcome = connection.recv()
    except AuthenticationError:
        raise InputError(f"token: is not that of the pool at {place}; set {TOKEN}") from None
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise ConnectionError(f"{place}: closed the connection") from None
    except Exception:
        raise InputError(f"join: {place} does not answer as a pool of optsched") from None
    if "refused" in welcome:
        raise InputError(f"join: the pool at {place} refuses: {welcome['refused']}")
    return connection, welcome


def hung_up(connection: Any, seconds: float = 0.0) -> bool:
    """Whether the other side is closed, though messages of it may be left."""
    poll = select.poll()
    poll.register(connection.fileno(), _HANG_UP)
    return bool(poll.poll(seconds * 1e3))


def interface_of(host: str) -> str:
    """Name of the network interface with the address of a host, this one; "" if unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(host))
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                row = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), 0x8915, row)[20:24] == wanted:  # SIOCGIFADDR
                    return name
    return ""


def local_host(connection: Any) -> str:
    """Address of this host on a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as given:
        return str(given.getsockname()[0])


def _connection(given: socket.socket) -> Connection:
    """Wrap a socket; a silent peer is an error, at first soon."""
    given.settimeout(None)
    given.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            given.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(given.detach())
    _limit(connection, _PATIENCE_S)
    return connection


def _limit(connection: Connection, seconds: int) -> None:
    """Set how long a read may take; 0: for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as given:
        given.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
