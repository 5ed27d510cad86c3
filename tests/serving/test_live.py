"""Images submitted by threads: every future is done once, with the right output or the reason."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import pytest
from depth import depth
from serving_cases import children

from optsched.errors import InputError
from optsched.serving import JSED, Plan, Router, Scenario, Server, Settings, Static
from optsched.serving.routers import MarginalCost, RandomWidth, RoundRobin

torch = pytest.importorskip("torch")

from serving_nets import Perceptron  # noqa: E402

from optsched.serving.executor import DeadlineMissed, Executor, RequestsLost  # noqa: E402
from optsched.serving.live import LiveServer  # noqa: E402
from optsched.serving.network import shapes_of, work_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


NET = Perceptron()
SHAPE = (6,)
MIXED = Router(RandomWidth(), RoundRobin(), 4)
PLAN = Plan.of([(s, k, 1) for s in (0, 1) for k in range(3)])


def executor(router: Any = MIXED, **given: Any) -> Executor:
    """Two servers on the CPU; without a plan they load what they need."""
    scenario = Scenario(
        NET.widths, work_of(NET, SHAPE), [[10, 20]] * 3, [50.0 + j for j in range(8)],
        [Server(name, 60, 0.1, 1.0, 0, 0, 5.0) for name in ("a", "b")], [], max_batch=8,
    )  # fmt: skip
    return Executor(NET, scenario, router, **{"plan": PLAN, **given})


def right(image: Any, future: Future[Any]) -> bool:
    """Whether the answer is that of the whole network at the widths of the request."""
    found = future.result(0)
    with torch.inference_mode():
        return torch.allclose(found.output, NET(image[None], found.widths)[0], atol=1e-5)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server for several tests."""
    with LiveServer(executor(), SHAPE, 64) as found:
        yield found


def test_threads_and_a_death() -> None:
    """Eight threads, more images than rows, a server is killed: nothing is lost, keys in order."""
    before, n = children(), depth(800, 10_000)
    images = torch.randn(n, *SHAPE)
    futures: list[Any] = [None] * n
    done: list[int] = []

    def work(thread: int) -> None:
        for i in range(thread, n, 8):
            futures[i] = server.submit(images[i], key=thread if thread < 6 else None)
            futures[i].add_done_callback(lambda _, i=i: done.append(i))
            if i == n // 2:
                os.kill(min(children() - before), signal.SIGKILL)

    with LiveServer(executor(plan=None), SHAPE, 128) as server:
        threads = [threading.Thread(target=work, args=(j,)) for j in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert sorted(done) == list(range(n))
    assert all(map(right, images, futures))
    for j in range(6):
        assert [i for i in done if i % 8 == j] == list(range(j, n, 8))
    found = server.telemetry()
    assert (found.answered, found.lost, found.in_progress) == (n, 0, 0)
    assert [one.alive for one in found.servers].count(False) >= 1
    assert children() == before


def test_deadlines(server: LiveServer) -> None:
    """Requests that cannot be answered in time are shed; others are answered beside them."""
    before = server.telemetry()
    images = torch.randn(40, *SHAPE)
    limits = (60_000, 0.0, math.inf, 0.0)
    futures = [server.submit(x, limits[i % 4]) for i, x in enumerate(images)]
    wait(futures, 30)
    for i, (image, future) in enumerate(zip(images, futures, strict=True)):
        if i % 2:
            assert isinstance(future.exception(0), DeadlineMissed)
        else:
            assert right(image, future) and not future.result(0).late
    after = server.telemetry()
    assert (after.answered - before.answered, after.shed - before.shed) == (20, 20)
    assert after.mean_ms is not None and after.p99_ms is not None and after.p99_ms > 0
    assert [one.note for one in after.servers] == ["no GPU"] * 2
    assert all(0 <= one.utilisation <= 1 and one.instances for one in after.servers)


def test_cancelled_requests_are_not_served(server: LiveServer) -> None:
    """Their rows are free again: more images than rows."""
    for _ in range(200):
        server.submit(torch.zeros(SHAPE)).cancel()
    assert server.submit(torch.zeros(SHAPE)).result(30).output.shape == (4,)


def test_order_of_a_key(server: LiveServer) -> None:
    """Also of requests that are shed, beside cancelled ones."""
    done, futures = [], []
    for i in range(90):
        future = server.submit(torch.randn(SHAPE), 0.0 if i % 5 == 0 else None, key=("k", i % 3))
        future.add_done_callback(lambda _, i=i: done.append(i))
        if i % 7 == 0:
            future.cancel()
        futures.append(future)
    wait(futures, 30)
    server.submit(torch.zeros(SHAPE), key=("k", 0)).result(30)  # after the callbacks of all
    for j in range(3):
        kept = [i for i in range(j, 90, 3) if not futures[i].cancelled()]
        assert [i for i in done if i in kept] == kept
    assert server.telemetry().in_progress == 0
    for key in ([], ("k", [])):
        with pytest.raises(InputError, match="key: expected a hashable"):
            server.submit(torch.zeros(SHAPE), key=key)


@pytest.mark.parametrize(
    ("image", "deadline", "message"),
    [
        (torch.zeros(5), None, r"image: expected floats of shape \(6,\), got torch.float32"),
        (torch.zeros(6).int(), None, "image: expected floats"),
        (torch.zeros(6, device="meta"), None, "image: expected floats"),
        ("image", None, "image: expected floats, got 'image'"),
        (torch.zeros(6), -1.0, "deadline"),
        (torch.zeros(6), float("nan"), "deadline"),
        (torch.zeros(6), True, "deadline"),
    ],
)
def test_bad_input(server: LiveServer, image: Any, deadline: Any, message: str) -> None:
    """It is refused at once."""
    with pytest.raises(InputError, match=message):
        server.submit(image, deadline)


def test_the_end() -> None:
    """Stop answers what is in progress, late without shedding; no image is taken after it.

    Objects that were there are collected again.
    """
    gc.unfreeze()
    server = LiveServer(executor(MarginalCost(), settings=Settings(shed=False)), SHAPE)
    images = torch.randn(50, *SHAPE)
    futures = [server.submit(one, 0.0) for one in images]
    assert gc.get_freeze_count() > 0
    stopped = threading.Event()

    def stop(_: object) -> None:
        server.stop()
        stopped.set()

    futures[-1].add_done_callback(stop)
    server.stop()
    assert stopped.wait(30)
    assert gc.get_freeze_count() == 0
    assert all(map(right, images, futures)) and all(one.result(0).late for one in futures)
    assert server.telemetry().late == 50
    server.stop()
    with pytest.raises(InputError, match="takes no images: it was stopped"):
        server.submit(images[0])


def test_what_no_server_can_run() -> None:
    """An error of the network is that of its image alone; if all servers are killed, all end.

    What the process froze itself stays frozen.
    """
    gc.freeze()
    before = children()
    with LiveServer(executor(), SHAPE) as server:
        for _ in range(2):
            images = [torch.full(SHAPE, -1e9 if i % 5 == 2 else float(i)) for i in range(20)]
            for i, future in enumerate([server.submit(image) for image in images]):
                if i % 5 == 2:
                    with pytest.raises(RequestsLost, match="network failed: ValueError: poison"):
                        future.result(30)
                else:
                    found = future.result(30)
                    torch.testing.assert_close(found.output, NET(images[i][None], found.widths)[0])
        assert all(one.alive for one in server.telemetry().servers)
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)
        server._thread.join(10)
        with pytest.raises(RequestsLost, match="takes no images: servers died"):
            server.submit(torch.zeros(SHAPE))
        assert (server.telemetry().lost, server.telemetry().in_progress) == (8, 0)
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_an_error_of_the_network_in_a_replay() -> None:
    """The other requests are served; the error names those that are not."""
    one = executor()
    scenario = one.scenario.replace(arrival_ms=[float(i) for i in range(20)])
    images = torch.randn(20, *SHAPE)
    images[7] = -1e9
    with pytest.raises(RequestsLost, match=r"ValueError: poison; .* not done: 7$") as caught:
        Executor(NET, scenario, MIXED, PLAN).run(images)
    assert caught.value.run is not None
    assert caught.value.run.outputs.isnan().any(1).nonzero().tolist() == [[7]]


class Broken:
    """A router with a fault."""

    def route(self, _view: Any) -> Any:
        """Raise."""
        raise ZeroDivisionError("fault")


def test_a_router_that_raises() -> None:
    """Futures have its error."""
    with LiveServer(executor(Broken()), SHAPE) as server:
        assert isinstance(server.submit(torch.zeros(SHAPE)).exception(30), ZeroDivisionError)


def test_work_of_any_network() -> None:
    """By hand; shapes that do not fit are refused."""
    assert work_of(NET, SHAPE)[1] == [[64e-6, 128e-6], [128e-6, 256e-6]]
    assert shapes_of(NET, SHAPE) == [[(6,)], [(8,), (16,)], [(8,), (16,)], [(4,), (4,)]]
    for wrong in (6, (), (-1,), (6.0,), ("6",), (True,)):
        with pytest.raises(InputError, match=r"^shape: expected"):
            work_of(NET, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="net: segment 0 at width 0 fails on an input of shape"):
        shapes_of(NET, (7,))
    with pytest.raises(InputError, match="another net or image size"):
        other = executor().scenario.replace(mmac=[[[1.0, 1.0]], *[[[1.0, 1.0]] * 2] * 2])
        LiveServer(Executor(NET, other, Router(Static((0, 0, 0)), JSED())), SHAPE)
