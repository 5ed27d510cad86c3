"""Endpoint of a slimmable network: an image, the scores of its classes."""

from __future__ import annotations

import asyncio
import math
from base64 import b64decode
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.service.answers import Refused, read_tree
from optsched.service.requests import Answer, Body
from optsched.service.routes import Route
from optsched.serving.executor import DeadlineMissed, RequestsLost

if TYPE_CHECKING:
    from concurrent.futures import Future

    from starlette.requests import Request

    from optsched.serving.live import Answer as Output
    from optsched.serving.live import LiveServer


class Infer(Body, kw_only=True):
    """Classify an image."""

    image: list[Any] | str
    """Nested lists of numbers; or base64 of little-endian float32 or of uint8, with `shape`."""
    shape: list[Annotated[int, msgspec.Meta(ge=1)]] | None = None
    dtype: Literal["float32", "uint8"] = "float32"
    """Floats are normalised as in training; uint8: colours 0 to 255, normalised as CIFAR-100."""
    deadline_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Time until the answer is due."""


class Inferred(Answer, kw_only=True):
    """Scores of an image."""

    label: int = msgspec.field(name="class")
    """Index of the highest score."""
    logits: list[float]
    widths: list[int]
    """Index of the width of every segment."""
    ms: float
    """Time from the submission to the answer."""
    late: bool = False
    """Whether the answer came after its deadline."""


def infer_route(server: LiveServer) -> Route:
    """Return the endpoint of a live server, which the caller stops."""

    def submit(body: Infer) -> Future[Output]:
        return server.submit(pixels(body), body.deadline_ms)

    async def infer(request: Request, data: bytes) -> Inferred:
        body = decode(read_tree(data), Infer, "body")
        limit = request.app.state.settings.timeout
        try:
            with anyio.fail_after(limit):
                future = await anyio.to_thread.run_sync(submit, body)  # may block: rows are in use
                found = await asyncio.wrap_future(future)
        except DeadlineMissed as error:
            raise Refused(504, f"deadline_ms: {error}", body.deadline_ms) from None
        except RequestsLost as error:
            raise Refused(502, f"image: {error}") from None
        except TimeoutError:
            text = f"image: expected an answer within {limit:g} s, the limit of a request"
            raise Refused(422, text) from None
        scores = found.output.flatten()
        return Inferred(
            id=body.id, label=int(scores.argmax()), logits=scores.tolist(),
            widths=list(found.widths), ms=round(found.ms, 3),
            late=found.late,
        )  # fmt: skip

    text = "Classify an image by the network of --slim."
    return Route("POST", "/infer", text, Infer, Inferred, infer, (502, 504))


def pixels(body: Infer) -> Any:
    """Return the image of a body as finite floats."""
    from optsched.serving.network import normalised

    if isinstance(body.image, str):
        if body.shape is None:
            raise InputError("shape: expected the sizes of the image such as [3, 32, 32], got null")
        try:
            raw = b64decode(body.image, validate=True)
        except ValueError:
            raise InputError(f"image: expected base64, got {body.image!r:.40}") from None
        kind = np.dtype("<f4" if body.dtype == "float32" else "u1")
        if len(raw) != math.prod(body.shape) * kind.itemsize:
            raise InputError(
                f"image: expected {body.dtype} of shape {body.shape}, got {len(raw)} bytes"
            )
        found: Any = np.frombuffer(raw, kind).reshape(body.shape)
    else:
        try:
            found = np.array(body.image, object)
        except ValueError:
            found = np.array(None)
        if not {*map(type, found.flat)} <= {int, float}:
            raise InputError("image: expected nested lists of numbers, of equal lengths")
        if body.dtype == "uint8" and not ((found >= 0) & (found <= 255) & (found % 1 == 0)).all():
            raise InputError("image: expected integers in 0..255, as dtype is uint8")
    if body.dtype == "uint8":
        if found.ndim != 3 or len(found) != 3:
            raise InputError(f"dtype: uint8 is for 3 colours, got an image of shape {found.shape}")
        return normalised(found)
    if not (abs(found) < 1e38).all():  # NaN neither
        raise InputError("image: expected finite numbers below 1e38")
    return found.astype(np.float32)
