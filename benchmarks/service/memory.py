"""Memory of a service under mixed requests: examples of all queries, new clusters, hostile bodies.

The first sixth of the time warms up; then the resident memory of the service and its workers
should stay flat.

Run: python -m benchmarks.service.memory [--minutes 60] [--rate 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

from benchmarks.service.hostile import damaged
from benchmarks.service.server import Connection, Service, service
from optsched.service.queries import PATHS, QUERIES

SHARES = {"choose": 30, "decide": 30, "scores": 10, "what_if": 10, "verify": 10, "clear": 2,
          "plan": 1, "solve": 1}  # fmt: skip
"""How often a query is sent."""


def body(rng: random.Random, name: str) -> bytes:
    """Return an example, one of a cluster with another name, or a damaged one."""
    example = QUERIES[name].example | ({"time_limit": 0.2} if name == "solve" else {})
    kind = rng.random()
    if kind < 0.2:
        return damaged(rng, example)
    if kind < 0.4 and "cluster" in example:
        example = example | {"cluster": example["cluster"] | {"name": str(rng.random())}}
    return json.dumps(example).encode()


async def load(running: Service, rate: float, end: float, seed: int, counts: list[int]) -> None:
    """Send requests at a rate over one connection."""
    rng, connection = random.Random(seed), Connection(running.port)
    await connection.open()
    due = time.perf_counter()
    while (now := time.perf_counter()) < end:
        due = max(due + 1 / rate, now - 1)
        await asyncio.sleep(due - now)
        (name,) = rng.choices([*SHARES], [*SHARES.values()])
        status, content = await connection.post(PATHS[name], body(rng, name))
        assert status < 500, content
        counts[0] += 1


async def run(running: Service, minutes: float, rate: float) -> None:
    """Load the service, and print its memory 24 times."""
    begin, counts, found = time.perf_counter(), [0], list[int]()
    end = begin + 60 * minutes
    loads = [asyncio.create_task(load(running, rate / 4, end, i, counts)) for i in range(4)]
    print("minutes  requests  MB of all  by process")
    for i in range(1, 25):
        await asyncio.sleep(begin + 60 * minutes * i / 24 - time.perf_counter())
        sizes = [kilobytes // 1024 for kilobytes in running.memory().values()]
        found.append(sum(sizes))
        print(f"{minutes * i / 24:7.1f} {counts[0]:9,} {found[-1]:10}  {sizes}", flush=True)
    await asyncio.gather(*loads)
    early, late = found[4:9], found[-5:]
    change = sum(late) / sum(early) - 1
    print(f"from the second sixth to the last: {change:+.1%}")


def main() -> None:
    """Start a service and watch it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=100)
    given = parser.parse_args()
    with service("--workers", "1") as running:
        asyncio.run(run(running, given.minutes, given.rate))


if __name__ == "__main__":
    main()
