"""Client of the service: requests that are sent again until they are answered, exactly once."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote

import msgspec

from optsched.errors import Infeasible, InputError, InternalError, MissingExtra, OptschedError
from optsched.io.values import integer, label, number

try:
    import httpx
except ImportError:
    raise MissingExtra("the client", "service") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optsched.plan import ClusterSnapshot, PlanJob

    Job = PlanJob | Mapping[str, Any] | str

_AGAIN: Final = (502, 503, 504)


class Unavailable(OptschedError):
    """The service does not answer, or has too many requests.

    Examples
    --------
    >>> from optsched.service.client import Client, Unavailable
    >>> try:
    ...     Client("http://127.0.0.1:9", retries=0).read("main")
    ... except Unavailable:
    ...     print("no service")
    no service
    """


class Refused(InputError):
    """A request that the service refuses; `field`, `value` and `status` say which part and how.

    Examples
    --------
    >>> from optsched.service.client import Refused
    >>> error = Refused("gpus: expected an integer in 1..2^31, got 0", "gpus", 0)
    >>> error.field, error.value, error.status
    ('gpus', 0, 400)
    """

    def __init__(self, message: str, field: str = "", value: Any = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.value, self.status = field, value, status


class Started(NamedTuple):
    """GPUs of a job, such as ``"n01:0-3 n02"``, and their bandwidth in GB/s.

    Examples
    --------
    >>> from optsched.service.client import Started
    >>> Started("n01:0-3", 360.0).gpus
    'n01:0-3'
    """

    gpus: str
    bandwidth: float | None = None


class Client:
    """Connection to a service; also a context manager.

    Requests are sent again, `retries` times, if the connection is lost or the service is busy; a
    repeated change has the same id, so it is applied once.

    Examples
    --------
    >>> from optsched.service.client import Client
    >>> with Client("http://127.0.0.1:8765", timeout=10) as client:  # doctest: +SKIP
    ...     client.take("main", {"name": "a", "gpus": 8, "level": "host"}, id="a-1")
    Started(gpus='n01:0-7', bandwidth=463.9)
    >>> Client(retries=2).close()
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8765", *, token: str | None = None,
        timeout: float = 60.0, retries: int = 5,
    ) -> None:  # fmt: skip
        """`token` is by default that of the variable OPTSCHED_TOKEN, `timeout` of one answer."""
        number("timeout", timeout, above=True, what="seconds")
        self.retries = integer("retries", retries, 0, 100)
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InputError(f"url: expected one such as http://127.0.0.1:8765, got {url!r:.60}")
        token = os.environ.get("OPTSCHED_TOKEN") if token is None else token
        if token and not (isinstance(token, str) and re.fullmatch("[!-~]+", token)):
            raise InputError("token: expected visible ASCII characters without spaces")
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=url, timeout=timeout, headers=headers)
        except httpx.InvalidURL as error:
            raise InputError(f"url: {error}, got {url!r:.60}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def query(self, name: str, /, *, live: str | None = None, **body: Any) -> dict[str, Any]:
        """Answer a query such as ``choose`` or ``solve``; the page /docs of the service has all.

        ``plan`` and ``clear`` may be about a `live` cluster.
        """
        path = f"/v1/{name.replace('_', '-')}" if live is None else f"{_path(live)}/{name}"
        return self._send("POST", path, body)

    def create(self, cluster: str, snapshot: ClusterSnapshot, **more: Any) -> int:
        """Start a live cluster; return its version."""
        document = msgspec.json.decode(snapshot.to_json())
        body = {"id": uuid.uuid4().hex, "snapshot": document, **more}
        version: int = self._send("POST", _path(cluster), body)["version"]
        return version

    def read(self, cluster: str) -> dict[str, Any]:
        """Return ``version``, ``free`` and ``snapshot`` of a live cluster."""
        return self._send("GET", _path(cluster))

    def take(self, cluster: str, job: Job, *, id: str | None = None) -> Started:
        """Start a job, or a waiting one by its name, on the fastest free GPUs that it may use.

        If it cannot start now, the message of `Infeasible` has the reason.
        """
        found = self.change(cluster, start=[job], id=id)["started"]
        return Started(**next(iter(found.values())))

    def give(self, cluster: str, jobs: str | Iterable[str], *, id: str | None = None) -> int:
        """End jobs; return the version of the cluster."""
        names = [jobs] if isinstance(jobs, str) else [*jobs]
        version: int = self.change(cluster, give=names, id=id)["version"]
        return version

    def change(self, cluster: str, *, id: str | None = None, **parts: Any) -> dict[str, Any]:
        """Carry out a change with parts such as ``submit``, ``start``, ``give``, ``fail``, once."""
        body = {"id": id or uuid.uuid4().hex, **parts}
        return self._send("POST", f"{_path(cluster)}/changes", body)

    def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            content = None
            if body is not None:  # msgspec's encoder would send null for NaN
                content = json.dumps(msgspec.to_builtins(body), allow_nan=False).encode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"body: expected JSON ({error})") from None
        reason = ""
        for attempt in range(self.retries + 1):
            time.sleep(min(2.0, 0.05 * 2**attempt) if attempt else 0)
            try:
                answer = self._http.request(method, path, content=content)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                continue
            if answer.status_code not in _AGAIN:
                return _result(answer)
            reason = f"status {answer.status_code}: {answer.text:.200}"
        raise Unavailable(f"{self._http.base_url}: {reason}; tried {self.retries + 1} times")


def _path(cluster: str) -> str:
    return f"/v1/clusters/{quote(label('cluster', cluster), safe='')}"


def _result(answer: httpx.Response) -> dict[str, Any]:
    """Return the answer, or raise the error of a refusal."""
    status, fault = answer.status_code, None
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode(answer.content, type=dict[str, Any])
        if status == 200:
            return found
        fault = found.get("error")
    if not isinstance(fault, dict) or not isinstance(fault.get("message"), str):
        raise Unavailable(f"{answer.url}: no answer of optsched serve (status {status})")
    message, field, value = fault["message"], str(fault.get("field", "")), fault.get("value")
    if status == 500:
        raise InternalError(message)
    if status == 409 and field not in ("version", "id", "name"):
        raise Infeasible(message)
    raise Refused(message, field, value, status)
