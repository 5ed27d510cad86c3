"""What every request passes: token, limits of size and number, metrics."""

from __future__ import annotations

import hmac
import re
from base64 import b64decode
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from optsched.service.answers import LOGGER, Refused, Reply, answer, refused
from optsched.service.queries import PATHS, QUERIES
from optsched.service.settings import is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from optsched.service.settings import Settings

_BUCKETS = (.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60)  # fmt: skip

_QUICK: Final = {PATHS[name]: name for name, query in QUERIES.items() if query.quick}

_HEADERS: Final = {
    401: "www-authenticate: Bearer", 408: "connection: close", 413: "connection: close",
    503: "retry-after: 1",
}  # fmt: skip

_MOST_HEADERS: Final = 1 << 16
_LONG: Final = re.compile(rb'"(?:best|deadline|explain|model)"')
"""Fields with which a small decision may take long."""


class Metrics:
    """Numbers for Prometheus, of one service."""

    def __init__(self) -> None:
        self.registry = found = CollectorRegistry()
        ProcessCollector(registry=found)
        self.requests = Counter("optsched_requests", "Answered requests.", ["path", "status"],
                                registry=found)  # fmt: skip
        self.seconds = Histogram("optsched_request_seconds", "From the first byte to the answer.",
                                 ["path"], buckets=_BUCKETS, registry=found)  # fmt: skip
        self.in_flight = Gauge("optsched_in_flight", "Requests in work.", registry=found)
        self.queue = Gauge("optsched_queue", "Requests that have no worker yet.", registry=found)
        self.workers = Gauge("optsched_workers_busy", "Workers that compute.", registry=found)
        self.lost = Counter("optsched_workers_lost", "Workers that died or were stopped.", ["why"],
                            registry=found)  # fmt: skip


class Gate:
    """ASGI middleware: counts all requests, refuses some, and answers small decisions itself."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.n = 0
        token = settings.token
        self._secret = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = perf_counter(), 499  # the client has gone

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.n += 1
        self.metrics.in_flight.set(self.n)
        try:
            await self._pass(scope, receive, counted)
        finally:
            self.n -= 1
            self.metrics.in_flight.set(self.n)
            path = getattr(scope.get("route"), "path", "other")
            path = scope["path"] if scope["path"] in _QUICK else path
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(perf_counter() - begin)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse the request, or hand it on with its whole body."""
        try:
            headers = self._checked(scope)
            body = await self._body(headers, receive)
        except ClientDisconnect:
            return
        except Refused as error:
            await response(refused(error))(scope, receive, send)
            return
        name = _QUICK.get(scope["path"]) if scope["method"] == "POST" else None
        if name and len(body) <= self.settings.quick_body and not _LONG.search(body):
            reply = answer(name, body, self.settings.timeout)
            await response(reply)(scope, receive, send)
            return
        ready: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return ready.pop() if ready else await receive()

        await self.app(scope, replay, send)

    def _checked(self, scope: Scope) -> dict[bytes, bytes]:
        """Return the headers of a request, or refuse it."""
        headers = dict(scope["headers"])
        if self._secret is not None and scope["path"] != "/v1/health":
            given = _bearer(headers.get(b"authorization", b""))
            if not hmac.compare_digest(given, self._secret):
                text = "expected the token of this service, as in: Authorization: Bearer TOKEN"
                raise Refused(401, f"authorization: {text}")
        host = headers.get(b"host", b"localhost").decode("latin-1").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._secret is None and not is_loopback(name.strip("[]")):
            text = f"expected localhost, got {host!r:.60}; a service without token is local"
            raise Refused(403, f"host: {text}", host[:60])
        if (size := sum(len(k) + len(v) for k, v in scope["headers"])) > _MOST_HEADERS:
            raise Refused(413, f"headers: expected at most {_MOST_HEADERS} bytes, got {size}", size)
        if self.n > (most := self.settings.in_flight):
            text = f"{most} requests are being answered; send it again later"
            raise Refused(503, f"in_flight: {text}", self.n)
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":
                value = kind.decode("latin-1")[:60]
                text = f"content-type: expected application/json, got {value!r}"
                raise Refused(415, text, value)
        return headers

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most, limit, parts = self.settings.max_body, self.settings.timeout, list[bytes]()
        length = headers.get(b"content-length", b"0")
        size = int(length) if length.isdigit() and int(length) > most else 0
        try:
            with anyio.fail_after(limit):
                while size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size <= most and not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            text = f"body: expected the whole body within {limit:g} s"
            raise Refused(408, text) from None
        text = f"body: expected at most {most} bytes, got {size} or more; see --max-body"
        raise Refused(413, text, size)


def _bearer(given: bytes) -> bytes:
    """Return a header with a password as one with a token: kube-scheduler sends no other."""
    kind, _, text = given.partition(b" ")
    if kind.lower() != b"basic":
        return given
    with suppress(ValueError):
        return b"Bearer " + b64decode(text.strip(), validate=True).partition(b":")[2]
    return b""


def response(reply: Reply) -> Response:
    """Return the HTTP response of a reply, with the headers that go with its status."""
    if reply.trace:
        LOGGER.error(reply.trace)
    key, _, value = _HEADERS.get(reply.status, "").partition(": ")
    headers = {key: value} if key else None
    return Response(reply.content, reply.status, headers, reply.kind)
