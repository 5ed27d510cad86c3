"""Client of the service: requests that are sent again until they are answered, exactly once."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from optsched.errors import Infeasible, InputError, InternalError, MissingExtra, OptschedError
from optsched.io.values import integer, number

try:
    import httpx
except ImportError:
    raise MissingExtra("the client", "service") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optsched.plan import ClusterSnapshot, PlanJob

    Job = PlanJob | Mapping[str, Any]

_AGAIN: Final = (502, 503, 504)


class Unavailable(OptschedError):
    """The service does not answer, or has too many requests."""


class Refused(InputError):
    """A request that the service refuses; `field`, `value` and `status` say which part and how."""

    def __init__(self, message: str, field: str = "", value: Any = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.value, self.status = field, value, status


class Started(NamedTuple):
    """GPUs of a job, such as ``"n01:0-3 n02"``, and their bandwidth in GB/s."""

    gpus: str
    bandwidth: float | None = None


class Client:
    """Connection to a service; also a context manager.

    Parameters
    ----------
    url
        Address of the service.
    token
        Its token [default: the variable OPTSCHED_TOKEN].
    timeout
        Seconds for one answer.
    retries
        Number of further attempts if the connection is lost or the service is busy. A repeated
        change has the same id, so it is applied once.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8765",
        *,
        token: str | None = None,
        timeout: float = 60.0,
        retries: int = 5,
    ) -> None:
        number("timeout", timeout, above=True, what="seconds")
        self.retries = integer("retries", retries, 0, 100)
        token = os.environ.get("OPTSCHED_TOKEN") if token is None else token
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=url, timeout=timeout, headers=headers)
        except (httpx.InvalidURL, UnicodeEncodeError, TypeError) as error:
            raise InputError(f"url, token: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def query(self, name: str, **body: Any) -> dict[str, Any]:
        """Answer a query such as ``choose``, ``solve``, ``plan``; the page /docs has all fields."""
        return self._send("POST", f"/v1/{name.replace('_', '-')}", body)

    def create(self, cluster: str, snapshot: ClusterSnapshot, **more: Any) -> int:
        """Start a live cluster; return its version."""
        document = msgspec.Raw(snapshot.to_json())
        body = {"id": uuid.uuid4().hex, "snapshot": document, **more}
        version: int = self._send("POST", f"/v1/clusters/{cluster}", body)["version"]
        return version

    def read(self, cluster: str) -> dict[str, Any]:
        """Return ``version``, ``free`` and ``snapshot`` of a live cluster."""
        return self._send("GET", f"/v1/clusters/{cluster}")

    def take(self, cluster: str, job: Job, *, id: str | None = None) -> Started:
        """Start a job on the fastest free GPUs that its facts and the quotas allow.

        Raises
        ------
        Infeasible
            It cannot start now; the message has the reason.
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
        return self._send("POST", f"/v1/clusters/{cluster}/changes", body)

    def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        content = None if body is None else msgspec.json.encode(body)
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(2.0, 0.05 * 2**attempt))
            try:
                answer = self._http.request(method, path, content=content)
            except httpx.TransportError as error:
                reason = f"{self._http.base_url}: {error or type(error).__name__}"
                continue
            if answer.status_code not in _AGAIN:
                return _result(answer)
            reason = f"{self._http.base_url}: status {answer.status_code}: {answer.text:.200}"
        raise Unavailable(f"{reason}; tried {self.retries + 1} times")


def _result(answer: httpx.Response) -> dict[str, Any]:
    """Return the answer, or raise the error of a refusal."""
    status = answer.status_code
    try:
        found = msgspec.json.decode(answer.content, type=dict[str, Any])
    except msgspec.DecodeError:
        raise Unavailable(f"{answer.url}: is no optsched service (status {status})") from None
    if status == 200:
        return found
    fault = found.get("error", {})
    message, field = str(fault.get("message", answer.text[:200])), str(fault.get("field", ""))
    if status == 500:
        raise InternalError(message)
    if status == 409 and field != "version":
        raise Infeasible(message)
    raise Refused(message, field, fault.get("value"), status)
