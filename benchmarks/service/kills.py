"""Kill a service again and again under load, and compare its journal with what it acknowledged.

Run: python benchmarks/service/kills.py [--kills 200] [--clients 8] [--folder DIR]

Every client starts and ends a job of its own. After each kill (SIGKILL at a random moment) the
journal is read: every acknowledged change is in it, besides at most the one change of each client
that was under way. The next round sends that one again under its id. At the end the version of
the cluster is the number of different ids: each was applied once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from optsched import plan
from optsched.bandwidth import BottleneckBandwidth, ClusterState, synthetic
from optsched.plan.starts import start_one
from optsched.service import live as live_module
from optsched.service.app import live_routes
from optsched.service.live import Live

JOB_GPUS = 2

IDS = 50
"""Changes between two rewrites of a journal, so that kills come during some of them."""


def start_server(folder: Path) -> tuple[int, int]:
    """Fork a process that serves the live clusters of a folder; return its id and its port."""
    bound = socket.create_server(("127.0.0.1", 0))
    if (child := os.fork()) == 0:
        try:
            app = Starlette()
            for one in live_routes(Live(folder)):
                app.add_route(one.path, one.answer, [one.method])
            uvicorn.Server(uvicorn.Config(app, log_level="error")).run([bound])
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    port = bound.getsockname()[1]
    bound.close()
    return child, port


def post(link: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a body and return the answer; an error of the service is raised."""
    link.request(
        "POST", f"/v1/clusters{path}", json.dumps(body), {"content-type": "application/json"}
    )
    reply = link.getresponse()
    found: dict[str, Any] = json.loads(reply.read())
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {found}")
    return found


class Client(threading.Thread):
    """Starts and ends one job in turn; `held` has the GPUs by the last acknowledged answer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.label, self.sent, self.acknowledged, self.port = name, 0, 0, 0
        self.held: str | None = None
        self.fault: RuntimeError | None = None
        self.answer: dict[str, Any] = {}

    def again(self, port: int) -> Client:
        """Return a thread that goes on where this one was interrupted."""
        new = Client(self.label)
        new.acknowledged, new.held, new.port = self.acknowledged, self.held, port
        return new

    def run(self) -> None:
        """Send changes until the service is gone."""
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            while True:
                self.sent = self.acknowledged + 1
                body: dict[str, Any] = {"id": f"{self.label}-{self.sent}"}
                if self.held is None:
                    body["start"] = [{"name": self.label, "gpus": JOB_GPUS}]
                else:
                    body["give"] = [self.label]
                answer = post(link, "/c/changes", body)
                started = answer.get("started")
                self.held = started[self.label]["gpus"] if started else None
                self.acknowledged = self.sent
        except RuntimeError as error:
            self.fault = error
        except (OSError, http.client.HTTPException):
            pass
        link.close()


def kill_again_and_again(folder: Path, kills: int, clients: int, seed: int = 0) -> dict[str, Any]:
    """Return counts; AssertionError if the journal and the answers differ."""
    rng, live_module.IDS = random.Random(seed), IDS  # type: ignore[misc]
    cluster = synthetic.cluster("nvswitch", -(-clients * JOB_GPUS // 8))
    snapshot = plan.ClusterSnapshot(ClusterState.idle(cluster))
    job = plan.PlanJob(name="first", gpus=JOB_GPUS)
    start_one(snapshot, job, BottleneckBandwidth(cluster), {})  # kernels, before the first fork
    create = {"id": "create", "snapshot": json.loads(snapshot.to_json())}
    threads = [Client(f"job{i}") for i in range(clients)]
    unacknowledged = 0
    for _ in range(kills):
        child, port = start_server(folder)
        if not (folder / "c.journal").exists():
            post(http.client.HTTPConnection("127.0.0.1", port), "/c", create)
        threads = [one.again(port) for one in threads]
        for one in threads:
            one.start()
        due = sum(one.acknowledged for one in threads) + rng.randrange(10 * clients)
        end = time.monotonic() + 2
        while sum(one.acknowledged for one in threads) < due and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for one in threads:
            one.join()
        unacknowledged += compare(folder, threads)
    return {
        "kills": kills, "acknowledged": sum(one.acknowledged for one in threads),
        "journaled, not acknowledged": unacknowledged,
    }  # fmt: skip


def compare(folder: Path, threads: list[Client]) -> int:
    """Compare the journal with the answers; return the number of changes without an answer."""
    live = Live(folder)
    status = live.clusters["c"].status
    live.close()
    held = {job.name: status.state.cluster.written(job.gpus) for job in status.state.jobs}
    more = 0
    for one in threads:
        assert one.fault is None, one.fault
        if held.get(one.label) != one.held:  # only by the change that was under way
            assert one.sent == one.acknowledged + 1
            assert (one.label in held) == (one.held is None), (held, one.held)
            more += 1
    assert status.version == sum(one.acknowledged for one in threads) + more
    return more


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(kill_again_and_again(given.folder or Path(folder), given.kills, given.clients))


if __name__ == "__main__":
    main()
