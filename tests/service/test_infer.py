"""Images over HTTP: the scores of the network, refusals, deadlines, dead servers, the end."""

from __future__ import annotations

import json
import os
import signal
import socket
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_cases import children

torch = pytest.importorskip("torch")

from starlette.testclient import TestClient  # noqa: E402

from benchmarks.service.server import service  # noqa: E402
from optsched.service.app import create_app  # noqa: E402
from optsched.service.infer import infer_route  # noqa: E402
from optsched.service.settings import Settings  # noqa: E402
from optsched.serving import Executor, LiveServer, Scenario, Server, SlimResNet  # noqa: E402
from optsched.serving.network import normalised, save_network, work_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NET = SlimResNet(5, channels=(4, 8), blocks=1, in_channels=3, group_channels=2, widths=(0.5, 1.0))
SHAPE = (3, 8, 8)
COLOURS = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
FLOATS = np.random.default_rng(1).normal(size=SHAPE).astype("<f4")


def scenario(net: SlimResNet, shape: tuple[int, ...]) -> Scenario:
    """Two servers on the CPU."""
    return Scenario(
        net.widths, work_of(net, shape), [[10, 20]] * 2, [50.0 + j for j in range(4)],
        [Server(name, 60, 0.1, 1.0, 0, 0, 5.0) for name in ("a", "b")], [], max_batch=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[TestClient]:
    """A service with a network; it knows the processes of the servers."""
    before = children()
    with (
        LiveServer(Executor(NET, scenario(NET, SHAPE)), SHAPE, 64) as server,
        nullcontext(children() - before) as servers,
        TestClient(create_app(Settings(workers=1), more=[infer_route(server)]),
                   base_url="http://localhost") as found,
    ):  # fmt: skip
        found.app_state["servers"] = servers
        yield found


def right(answer: Any, image: Any) -> bool:
    """Whether an answer is that of the whole network at its widths."""
    with torch.inference_mode():
        scores = NET(torch.as_tensor(image)[None], answer["widths"])[0]
    close = torch.allclose(torch.tensor(answer["logits"]), scores, atol=1e-4)
    return close and answer["class"] == int(scores.argmax()) and answer["ms"] > 0


def test_forms_of_an_image(running: TestClient) -> None:
    """Lists and base64, floats and colours: the same scores as in this process."""
    for image, kind in ((FLOATS, "float32"), (COLOURS, "uint8")):
        expected = image if kind == "float32" else normalised(image)
        text = b64encode(image.tobytes()).decode()
        for body in ({"image": image.tolist()}, {"image": text, "shape": SHAPE}):
            sent = running.post("/infer", json={**body, "dtype": kind, "id": 7})
            assert sent.status_code == 200 and right(sent.json(), expected), sent.text
            assert sent.json()["id"] == 7 and "late" not in sent.json()


def test_many_at_once(running: TestClient) -> None:
    """Every image has its scores; one without time is refused by a status of its own."""
    images = np.random.default_rng(2).normal(size=(60, *SHAPE)).astype("<f4")

    def send(i: int) -> Any:
        more = {"deadline_ms": 0} if i % 3 == 0 else {"deadline_ms": 60_000}
        return running.post("/infer", json={"image": images[i].tolist(), **more})

    with ThreadPoolExecutor(8) as pool:
        for i, sent in enumerate(pool.map(send, range(60))):
            if i % 3:
                assert sent.status_code == 200 and right(sent.json(), images[i]), sent.text
            else:
                assert sent.status_code == 504, sent.text
                assert sent.json()["error"]["field"] == "deadline_ms"


TEXT = b64encode(FLOATS.tobytes()).decode()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"image": TEXT}, "shape"),
        ({"image": TEXT, "shape": [3, 8, 9]}, "image"),
        ({"image": TEXT, "shape": [10**30]}, "image"),
        ({"image": TEXT, "shape": [-3, 8, -8]}, "shape[0]"),
        ({"image": TEXT[:-1], "shape": SHAPE}, "image"),
        ({"image": "é", "shape": SHAPE}, "image"),
        ({"image": TEXT, "shape": [8, 8, 3]}, "image"),
        ({"image": [[1.0], [2.0, 3.0]]}, "image"),
        ({"image": [["1"]]}, "image"),
        ({"image": (COLOURS > 9).tolist()}, "image"),
        ({"image": [COLOURS[0].tolist(), COLOURS[1].tolist(), [[[True] * 8] * 8]]}, "image"),
        ({"image": np.full(SHAPE, "1").tolist()}, "image"),
        ({"image": []}, "image"),
        ({"image": 1}, "image"),
        ({"image": np.full(SHAPE, 1e39).tolist()}, "image"),
        ({"image": (COLOURS + 0.5).tolist(), "dtype": "uint8"}, "image"),
        ({"image": [[1]], "dtype": "uint8"}, "dtype"),
        ({"image": [1], "dtype": "float64"}, "dtype"),
        ({"image": FLOATS.tolist(), "deadline_ms": -1}, "deadline_ms"),
        ({"image": FLOATS.tolist(), "deadline_ms": True}, "deadline_ms"),
        ({"image": FLOATS.tolist(), "deadline": 1}, "body"),
    ],
)
def test_bad_input(running: TestClient, body: Any, field: str) -> None:
    """It is refused with its field."""
    sent = running.post("/infer", json=body)
    assert sent.status_code == 400, sent.text
    assert sent.json()["error"]["field"] == field, sent.text


@pytest.mark.slow
def test_sigterm_answers_requests_in_flight(tmp_path: Path) -> None:
    """All get their scores; then the exit code is 0, and no process is left.

    In flight is what the service has begun to read, as it says by "100 Continue". Connections on
    which it has read nothing yet are closed.
    """
    net, shape = SlimResNet(5, (64, 64), 1, 3, 8, (0.5, 1.0)), (3, 32, 32)
    save_network(net, tmp_path / "net.pt")
    scenario(net, shape).write(tmp_path / "s.json")
    body = json.dumps({"image": np.zeros(shape).tolist()}).encode()
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    given = ["--slim", str(tmp_path / "net.pt"), "--scenario", str(tmp_path / "s.json")]
    with service(*given, "--workers", "1") as running, ExitStack() as stack:
        connect = partial(socket.create_connection, ("127.0.0.1", running.port), 30)
        links = [stack.enter_context(connect()) for _ in range(40)]
        for link in links:
            link.sendall(head)
        assert {link.recv(99) for link in links} == {b"HTTP/1.1 100 Continue\r\n\r\n"}
        for link in links[:-1]:
            link.sendall(body)
        found = [links[0].recv(99)]
        running.process.send_signal(signal.SIGTERM)
        links[-1].sendall(body)
        found += [link.recv(99) for link in links[1:]]
        assert all(one.startswith(b"HTTP/1.1 200") for one in found), found


def test_dead_servers(running: TestClient) -> None:
    """The last test: lost requests have a status of their own, and the service goes on."""
    for one in running.app_state["servers"]:
        os.kill(one, signal.SIGKILL)
    for _ in range(2):
        sent = running.post("/infer", json={"image": FLOATS.tolist()})
        assert sent.status_code == 502 and "servers died" in sent.text, sent.text
    assert running.get("/v1/health").status_code == 200
