"""Endpoints as a table: how each is called, and its part of the OpenAPI page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.service.answers import Refusal, Reply, refused
from optsched.service.gate import response
from optsched.service.schemas import reference
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

_CODES: Final = {
    400: "The body is refused.", 401: "The token is missing or wrong.",
    403: "The host is not local.", 404: "There is no live cluster of this name.",
    408: "The body came too slowly.",
    409: "The cluster cannot satisfy it, or its id, name or version conflicts.",
    413: "The body is too large.", 415: "The body is no JSON.",
    422: "It takes too much time.",
    502: "The servers that ran it died: try again.",
    503: "Too many requests, or a worker died: try again.",
    504: "It could not be answered by its deadline.",
}  # fmt: skip


class Route(NamedTuple):
    """An endpoint.

    `text` describes it in a line; `body` and `result` are structs, or names of documents. `call`
    returns what is sent as JSON, or a reply. `codes` are those of 404, 409, 502 and 504 that it may
    have.
    """

    method: str
    path: str
    text: str
    body: Any
    result: Any
    call: Callable[[Request, bytes], Awaitable[Any]]
    codes: tuple[int, ...] = ()
    example: Any = None

    async def answer(self, request: Request) -> Response:
        """Answer a request, or refuse what is raised."""
        request.scope["route"] = self  # for the metrics
        data = await request.body()
        try:
            found = await self.call(request, data)
            if not isinstance(found, Reply):
                found = Reply(200, msgspec.json.encode(found))
        except Exception as error:
            found = refused(error, data, getattr(self.body, "__name__", ""))
        return response(found)

    def described(self) -> dict[str, Any]:
        """Return the part of the OpenAPI page."""
        fault = {"application/json": {"schema": reference(Refusal)}}
        answer = {"application/json": {"schema": reference(self.result)}}
        found: dict[str, Any] = {
            "summary": self.text, "operationId": re.sub(r"\W+", "_", self.method + self.path),
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", self.path)
            ],
            "responses": {
                "200": {"description": "The answer.", "content": answer},
                **{str(code): {"description": text, "content": fault} for code, text
                   in _CODES.items() if code not in (404, 409, 502, 504) or code in self.codes},
            },
        }  # fmt: skip
        if self.body is not None:
            content = {"schema": reference(self.body)}
            if self.example is not None:
                content["example"] = self.example
            found["requestBody"] = {"required": True, "content": {"application/json": content}}
        return found


def page(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI page without the schemas of `components`."""
    paths: dict[str, Any] = {}
    for one in routes:
        paths.setdefault(one.path, {})[one.method.lower()] = one.described()
    text = "Decides what runs where and in which order on a GPU cluster."
    info = {"title": "optsched", "version": __version__, "description": text}
    return {"openapi": "3.1.0", "info": info, "paths": paths}
