"""Endpoints of live clusters: create, change and read them, and plan their present state."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.service.answers import Reply, answer, read_tree, refusal, refused
from optsched.service.changes import Change, Changed, Present
from optsched.service.extender import routes
from optsched.service.gate import response
from optsched.service.live import Create, Live, LiveCluster
from optsched.service.requests import QUERIES
from optsched.service.schemas import operation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from optsched.bandwidth import BandwidthModel, ClusterState
    from optsched.service.workers import Workers


def routers(folder: Path | None) -> list[APIRouter]:
    """Return the endpoints of live clusters, if there is a folder for them, and of extenders.

    Raises
    ------
    InputError
        Another service uses the folder, it cannot be written, or a journal is damaged.
    """
    live = None if folder is None else Live(folder)

    def known(name: str) -> tuple[BandwidthModel, ClusterState]:
        if live is None or name not in live.clusters:
            raise InputError(f"name: no live cluster {name!r:.60}; see optsched serve --state")
        return live.clusters[name].model, live.clusters[name].status.state

    return [routes(known)] + ([] if live is None else [live_router(live)])


def live_router(live: Live) -> APIRouter:
    """Return the endpoints of live clusters; the end of the application closes them."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for one in live.clusters.values():
            await one.finish()
        live.close()

    router = APIRouter(prefix="/v1/clusters", lifespan=lifespan)

    def add(path: str, call: Callable[[Request], Awaitable[Reply]], method: str, text: str,
            body: Any, result: Any) -> None:  # fmt: skip
        async def endpoint(request: Request) -> Response:
            return response(await call(request))

        codes = (404, 409) if path else ()
        described = operation(text, body, result, codes=codes)
        router.add_api_route(path, endpoint, methods=[method], **described)

    async def versions(request: Request) -> Reply:
        found = {name: one.status.version for name, one in live.clusters.items()}
        return Reply(200, msgspec.json.encode(found))

    async def read(request: Request) -> Reply:
        if isinstance(cluster := _cluster(live, request), Reply):
            return cluster
        return Reply(200, msgspec.json.encode(Present.of(cluster)))

    async def create(request: Request) -> Reply:
        name = request.path_params["name"]
        return await _reply(request, Create, lambda body: live.create(name, body))

    async def change(request: Request) -> Reply:
        if isinstance(cluster := _cluster(live, request), Reply):
            return cluster
        return await _reply(request, Change, cluster.change)

    def query(kind: str) -> Callable[[Request], Awaitable[Reply]]:
        async def call(request: Request) -> Reply:
            if isinstance(cluster := _cluster(live, request), Reply):
                return cluster
            return await _query(request, cluster, kind)

        return call

    add("", versions, "GET", "Versions of the live clusters by name.", None, dict)
    add("/{name}", read, "GET", "Read a live cluster.", None, Present)
    add("/{name}", create, "POST", "Create a live cluster.", Create, Changed)
    add("/{name}/changes", change, "POST", "Change a live cluster.", Change, Changed)
    for kind in QUERIES.keys() & {"plan", "clear"}:
        text = f"As /v1/{kind}, of the present state: without snapshot and model."
        add(f"/{{name}}/{kind}", query(kind), "POST", text, dict, QUERIES[kind].result)
    return router


def _cluster(live: Live, request: Request) -> LiveCluster | Reply:
    """Return the cluster of a path, or a refusal."""
    name = request.path_params["name"]
    if (found := live.clusters.get(name)) is not None:
        return found
    known = ", ".join(live.clusters) or "none"
    return refusal(404, "name", name[:60], f"no live cluster {name!r:.60}; known: {known:.200}")


async def _reply(
    request: Request, kind: type[Any], call: Callable[[Any], Awaitable[bytes]]
) -> Reply:
    """Decode a body, call, and turn exceptions into refusals."""
    data = await request.body()
    try:
        tree = read_tree(data)
        return Reply(200, await call(decode(tree, kind, "body")))
    except Exception as error:
        return refused(error, data, kind.__name__)


async def _query(request: Request, cluster: LiveCluster, kind: str) -> Reply:
    """Answer a query about the present state in a worker, with its version."""
    status, data = cluster.status, await request.body()
    tree = None
    try:
        tree = read_tree(data)
        if not isinstance(tree, dict) or tree.keys() & {"snapshot", "model"}:
            raise InputError("body: expected an object without snapshot and model")
    except InputError as error:
        return refused(error, data, kind)
    tree["snapshot"] = msgspec.Raw(status.snapshot(cluster.name).to_json())
    if cluster.model_document is not None:
        tree["model"] = cluster.model_document
    workers: Workers = request.app.state.workers
    limit, content = request.app.state.settings.timeout, msgspec.json.encode(tree)
    found = await workers.run(request.receive, answer, kind, content, limit)
    if found.status != 200:
        return found
    return found._replace(content=b'{"version":%d,%b' % (status.version, found.content[1:]))
