"""The application: endpoints of all queries, health, metrics, schemas; and its server."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import asynccontextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from optsched.errors import InputError, OptschedError
from optsched.service.answers import answer, refusal, refused
from optsched.service.gate import Gate, Metrics, response
from optsched.service.requests import PATHS, QUERIES
from optsched.service.schemas import bundle, components, operation
from optsched.service.settings import Settings
from optsched.service.workers import Workers, warm_up
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence


class Health(msgspec.Struct):
    """What the service is."""

    status: str
    version: str
    workers: int


def create_app(settings: Settings | None = None, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """Return the application; further routers are added to its endpoints.

    Parameters
    ----------
    settings
        Limits and token [default: `Settings`].
    routers
        Their endpoints read the limits and the workers at ``request.app.state``.
    """
    known = Settings() if settings is None else settings
    metrics = Metrics()
    workers = Workers(known, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await workers.keep(group)
            warm_up(quick=True)
            yield
            group.cancel_scope.cancel()

    app = FastAPI(
        title="optsched", version=__version__, lifespan=lifespan, openapi_url="/v1/openapi.json",
        docs_url="/docs", redoc_url=None,
        description="Decides what runs where and in which order on a GPU cluster.",
    )  # fmt: skip
    app.state.settings, app.state.workers, app.state.metrics = known, workers, metrics
    app.add_middleware(Gate, settings=known, metrics=metrics)
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(OptschedError, _refused)
    app.add_exception_handler(Exception, _refused)
    for router in (_endpoints(), *routers):
        app.include_router(router)
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = described()
            page.setdefault("components", {})["schemas"] = components()
            for path, item in page["paths"].items():
                for name, route in product(re.findall(r"{(\w+)}", path), item.values()):
                    route["parameters"] = [
                        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    ]
        return described()

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _endpoints() -> APIRouter:
    router = APIRouter(prefix="/v1")
    for name, query in QUERIES.items():
        described = operation(query.text, query.body, query.result, query.example, codes=(409,))
        route = PATHS[name].removeprefix(router.prefix)
        router.add_api_route(route, _query(name), methods=["POST"], name=name, **described)
    described = operation("Whether the service answers.", None, Health)
    router.add_api_route("/health", _health, **described)
    router.add_api_route("/metrics", _metrics, summary="Numbers for Prometheus.")
    described = operation("JSON Schema of a document or a message.", None, dict)
    router.add_api_route("/schemas/{name}", _schema, **described)
    return router


def _query(name: str) -> Callable[[Request], Any]:
    """Return the endpoint of a query that a worker answers."""

    async def endpoint(request: Request) -> Response:
        state, data = request.app.state, await request.body()
        limit = state.settings.timeout
        return response(await state.workers.run(request.receive, answer, name, data, limit))

    return endpoint


async def _health(request: Request) -> Response:
    settings: Settings = request.app.state.settings
    found = Health("ok", __version__, settings.workers)
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _schema(request: Request) -> Response:
    found = bundle(request.path_params["name"])
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Refuse unknown paths and methods in the form of all refusals."""
    path, method = request.url.path, request.method
    fault = ("path", path[:60], f"expected one of the paths on /docs, got {path!r:.60}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow", "another method")
        fault = ("method", method, f"expected {allowed}, got {method}")
    found = response(refusal(error.status_code, *fault))
    found.headers.update(error.headers or {})
    return found


async def _refused(request: Request, error: Exception) -> Response:
    """Refuse what an endpoint refuses by an exception."""
    return response(refused(error))


def serve(settings: Settings, routers: Sequence[APIRouter] = ()) -> int:
    """Serve until SIGTERM or SIGINT, finish what is in flight, and return the exit code."""
    host = settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, settings.port))
    except OSError as error:
        raise InputError(
            f"host, port: {host}:{settings.port} cannot be used ({error.strerror})"
        ) from None
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)  # the server raises them once more when it has ended
    config = uvicorn.Config(
        create_app(settings, routers), log_level="warning", access_log=False, lifespan="on",
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
