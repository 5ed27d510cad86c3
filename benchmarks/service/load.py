"""Rate and latency of small decisions over HTTP, at a fixed rate, on this machine.

Requests are sent on time whether or not earlier ones are answered; a latency counts from the time
at which the request was due. Every id must come back once.

Run: python -m benchmarks.service.load [--rate 1200] [--seconds 60] [--connections 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter

from benchmarks.service.server import Connection, Service, service
from optsched.bandwidth import synthetic
from optsched.bandwidth.topology import documents
from optsched.service.queries import PATHS, QUERIES


def cases() -> list[tuple[str, str]]:
    """Paths and bodies, the last brace left out: a pool of agents, and 64 GPUs half in use."""
    cluster = synthetic.cluster("nvswitch", 8)
    jobs = {"a": "n01:0-3", "b": "n02:0-5", "c": "n04", "d": "n05:2-7 n06", "e": "n07:0,1"}
    decide = {**QUERIES["decide"].example, "agents": [
        {"name": f"n{i}", "slots": 8, "used": i % 9} for i in range(8)
    ]}  # fmt: skip
    body = {
        "cluster": json.loads(documents.cluster_json(cluster)),
        "state": {"format": "optsched.state/1", "free": "rest", "jobs": [
            {"name": name, "gpus": gpus} for name, gpus in jobs.items()
        ]},
    }  # fmt: skip
    rows = [("decide", decide), *(("choose", body | {"gpus": k}) for k in (2, 4, 8))]
    return [(PATHS[name], json.dumps(one)[:-1]) for name, one in rows]


async def one_connection(
    port: int, first: int, step: int, rate: float, begin: float, end: float, found: Counter[str],
    times: list[float],
) -> None:  # fmt: skip
    """Send every `step`-th request from the `first` on."""
    connection, bodies, k = Connection(port), cases(), first
    await connection.open()
    while (due := begin + k / rate) < end:
        await asyncio.sleep(due - time.perf_counter())
        path, text = bodies[k % len(bodies)]
        status, content = await connection.post(path, f'{text}, "id": "r{k}"}}'.encode())
        times.append(time.perf_counter() - due)
        assert status == 200, content
        found[json.loads(content)["id"]] += 1
        k += step


async def run(running: Service, rate: float, seconds: float, connections: int) -> None:
    """Send all requests and print a row."""
    found, times = Counter[str](), list[float]()
    begin = time.perf_counter() + 0.2
    await asyncio.gather(*(
        one_connection(running.port, i, connections, rate, begin, begin + seconds, found, times)
        for i in range(connections)
    ))  # fmt: skip
    took = time.perf_counter() - begin
    times.sort()
    lost = int(rate * seconds) - len(found)
    twice = sum(n - 1 for n in found.values())
    row = [f"{1000 * times[int(len(times) * q)]:.1f}" for q in (0.5, 0.9, 0.99, 0.999)]
    print(f"{len(times) / took:7.0f} {' '.join(f'{one:>7}' for one in row)} {lost:5} {twice:6}")


def main() -> None:
    """Start a service and load it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=16)
    given = parser.parse_args()
    with service("--workers", "1") as running:
        asyncio.run(run(running, 200, 2, given.connections))
        print("    1/s  p50 ms  p90 ms  p99 ms p99.9 ms lost  twice")
        before = running.cpu()
        asyncio.run(run(running, given.rate, given.seconds, given.connections))
        spent = running.cpu() - before
        print(f"CPU of the service: {spent / given.rate / given.seconds * 1000:.2f} ms a request")


if __name__ == "__main__":
    main()
