"""The application: endpoints of all queries, health, metrics, schemas; and its server."""

from __future__ import annotations

import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match

from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.service import extender
from optsched.service.answers import Reply, answer, read_tree, refusal
from optsched.service.changes import Change, Changed, Present
from optsched.service.gate import Gate, Metrics, response
from optsched.service.live import Create, Live, LiveCluster
from optsched.service.queries import PATHS, QUERIES
from optsched.service.routes import Route, page
from optsched.service.schemas import bundle, components
from optsched.service.settings import Settings
from optsched.service.workers import Workers, warm_up
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence


class Health(msgspec.Struct):
    """What the service is."""

    status: str
    version: str
    workers: int


def create_app(
    settings: Settings | None = None, live: Live | None = None, more: Sequence[Route] = ()
) -> FastAPI:
    """Return the application; its end closes the live clusters.

    Further endpoints, `more`, find the workers at ``request.app.state.workers``.
    """
    known = settings or Settings()
    metrics = Metrics()
    workers = Workers(known, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await workers.keep(group)
            warm_up(quick=True)
            yield
            group.cancel_scope.cancel()
        if live is not None:
            await live.finish()

    app = FastAPI(title="optsched", lifespan=lifespan, openapi_url="/v1/openapi.json",
                  redoc_url=None, redirect_slashes=False)  # fmt: skip
    app.state.settings, app.state.workers = known, workers
    app.add_middleware(Gate, settings=known, metrics=metrics)
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    routes = [*_routes(known, workers, metrics), *more]
    if live is not None:
        routes += [*live_routes(live), *extender.routes(live)]
    for one in routes:
        app.add_route(one.path, one.answer, methods=[one.method])
    described = page(routes)
    app.openapi = lambda: described | {"components": {"schemas": components()}}  # type: ignore[method-assign]
    return app


def _routes(settings: Settings, workers: Workers, metrics: Metrics) -> list[Route]:
    """Return the endpoints of every service."""

    def query(name: str) -> Callable[[Request, bytes], Awaitable[Reply]]:
        async def call(request: Request, data: bytes) -> Reply:
            return await workers.run(request.receive, answer, name, data, settings.timeout)

        return call

    async def health(_: Request, data: bytes) -> Health:
        return Health("ok", __version__, settings.workers)

    async def numbers(_: Request, data: bytes) -> Reply:
        return Reply(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)

    async def schema(request: Request, _: bytes) -> dict[str, Any]:
        return bundle(request.path_params["name"])

    return [
        *(Route("POST", PATHS[name], one.text, one.body, one.result, query(name), (409,),
                one.example) for name, one in QUERIES.items()),
        Route("GET", "/v1/health", "Whether the service answers.", None, Health, health),
        Route("GET", "/v1/metrics", "Numbers for Prometheus.", None, dict, numbers),
        Route("GET", "/v1/schemas/{name}", "JSON Schema of a document or a message.", None, dict,
              schema),
    ]  # fmt: skip


def live_routes(live: Live) -> list[Route]:
    """Return the endpoints of the live clusters of a folder."""

    def found(request: Request) -> LiveCluster:
        return live.find(request.path_params["name"])

    async def versions(request: Request, _: bytes) -> dict[str, int]:
        return {name: one.status.version for name, one in live.clusters.items()}

    async def read(request: Request, _: bytes) -> Present:
        return Present.of(found(request))

    async def create(request: Request, data: bytes) -> msgspec.Raw:
        body = decode(read_tree(data), Create, "body")
        return msgspec.Raw(await live.create(request.path_params["name"], body))

    async def change(request: Request, data: bytes) -> msgspec.Raw:
        cluster = found(request)
        return msgspec.Raw(await cluster.change(decode(read_tree(data), Change, "body")))

    def query(kind: str) -> Callable[[Request, bytes], Awaitable[Reply]]:
        async def call(request: Request, data: bytes) -> Reply:
            return await _query(request, found(request), kind, data)

        return call

    path, codes = "/v1/clusters/{name}", (404, 409)
    return [
        Route("GET", "/v1/clusters", "Versions of the live clusters.", None, dict, versions),
        Route("GET", path, "Read a live cluster.", None, Present, read, codes),
        Route("POST", path, "Create a live cluster.", Create, Changed, create, codes),
        Route("POST", f"{path}/changes", "Change a live cluster.", Change, Changed, change, codes),
        *(Route("POST", f"{path}/{kind}", f"As /v1/{kind}, of the present state: no snapshot.",
                QUERIES[kind].body, QUERIES[kind].result, query(kind), codes)
          for kind in ("plan", "clear")),
    ]  # fmt: skip


async def _query(request: Request, cluster: LiveCluster, kind: str, data: bytes) -> Reply:
    """Answer a query about the present state in a worker, with its version."""
    tree: Any = read_tree(data)
    if not isinstance(tree, dict) or tree.keys() & {"snapshot", "model"}:
        raise InputError("body: expected an object without snapshot and model")
    version, state = cluster.status.version, request.app.state
    tree["snapshot"] = msgspec.Raw(cluster.status.snapshot(cluster.name).to_json())
    if cluster.model_document is not None:
        tree["model"] = cluster.model_document
    found: Reply = await state.workers.run(
        request.receive, answer, kind, msgspec.json.encode(tree), state.settings.timeout
    )
    if found.status != 200:
        return found
    return found._replace(content=b'{"version":%d,%b' % (version, found.content[1:]))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Refuse unknown paths and methods in the form of all refusals."""
    path, method, headers = request.url.path, request.method, error.headers or {}
    fault = ("path", path[:60], f"expected one of the paths on /docs, got {path!r:.60}")
    if error.status_code == 405:
        routes = [one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE]
        allowed = ", ".join(sorted({verb for one in routes for verb in one.methods or ()}))
        fault = ("method", method, f"expected {allowed}, got {method}")
        headers = {"Allow": allowed}
    found = response(refusal(error.status_code, *fault))
    found.headers.update(headers)
    return found


def serve(settings: Settings, live: Live | None = None, more: Sequence[Route] = ()) -> int:
    """Serve until SIGTERM or SIGINT, finish what is in flight, and return the exit code."""
    host, port = settings.host, settings.port
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise InputError(f"host, port: {host}:{port} cannot be used ({error.strerror})") from None
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)  # the server raises them once more when it has ended
    config = uvicorn.Config(
        create_app(settings, live, more), log_level="warning", access_log=False, lifespan="on",
        server_header=False, timeout_graceful_shutdown=int(settings.timeout) + 1,
    )  # fmt: skip
    server = _Server(config)
    server.run([bound])
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the address when requests are accepted."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            print(f"listening on http://{name}:{port} (see /docs)", flush=True)
