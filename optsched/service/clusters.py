"""Endpoints of live clusters: create, change and read them, and plan their present state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.service.answers import Reply, answer, read_tree
from optsched.service.changes import Change, Changed, Present
from optsched.service.live import Create, Live, LiveCluster
from optsched.service.queries import QUERIES
from optsched.service.routes import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request


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
