"""Changes of live clusters: rate and latency over HTTP, and what the journal's file costs.

Run: python -m benchmarks.service.storage [--seconds 20] [--connections 16] [--hosts 8]
     python -m benchmarks.service.storage --files

``--files`` compares appended lines with SQLite: writes of 1, 8 and 64 records, each of them on
the disk before the next; then one byte in the middle of the file is changed, and it is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.service.server import Connection, service
from optsched import plan
from optsched.bandwidth import ClusterState, synthetic
from optsched.errors import InputError
from optsched.service.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.service.server import Service

RECORD = b'{"id": "5f0c8f5e-6d0a-4c1e", "steps": [["take", "n01:0-7", "job"]], "answer": {}}' * 2


async def one_client(port: int, name: str, end: float, times: list[float]) -> None:
    """Start and end one job in turn."""
    connection, k = Connection(port), 0
    await connection.open()
    while (begin := time.perf_counter()) < end or k % 2:
        change = {"start": [{"name": name, "gpus": 2}]} if k % 2 == 0 else {"give": [name]}
        body = json.dumps({"id": f"{name}-{k}"} | change).encode()
        status, content = await connection.post("/v1/clusters/c/changes", body)
        assert status == 200, content
        times.append(time.perf_counter() - begin)
        k += 1


async def over_http(running: Service, seconds: float, connections: int, hosts: int) -> None:
    """Create a cluster, load it, and print a row."""
    port = running.port
    first, times = Connection(port), list[float]()
    await first.open()
    snapshot = plan.ClusterSnapshot(ClusterState.idle(synthetic.cluster("nvswitch", hosts)))
    body = {"id": "create", "snapshot": json.loads(snapshot.to_json())}
    status, content = await first.post("/v1/clusters/c", json.dumps(body).encode())
    assert status == 200, content
    for length in (2, seconds):
        times.clear()
        before = running.cpu()
        end = time.perf_counter() + length
        clients = (one_client(port, f"{length}-{i}", end, times) for i in range(connections))
        await asyncio.gather(*clients)
    times.sort()
    row = [f"{1000 * times[int(len(times) * q)]:.1f}" for q in (0.5, 0.9, 0.99)]
    used = 1000 * (running.cpu() - before) / len(times)
    print(f"{len(times) / seconds:7.0f} {' '.join(f'{one:>7}' for one in row)} {used:7.2f}")


def files(folder: Path) -> None:
    """Print records a second by kind and size of a write, and what is read after damage."""
    journal = Journal.create(folder / "lines", RECORD)
    kinds: dict[str, Callable[[int], None]] = {
        "lines, fdatasync": lambda n: journal.append(RECORD * n),
        "SQLite WAL, FULL": _sqlite(folder / "full", "FULL"),
        "SQLite WAL, NORMAL (not durable)": _sqlite(folder / "normal", "NORMAL"),
    }
    for name, write in kinds.items():
        rates = []
        for n in (1, 8, 64):
            begin = time.perf_counter()
            for _ in range(200):
                write(n)
            rates.append(f"{200 * n / (time.perf_counter() - begin):9,.0f}")
        print(f"{name:32} {' '.join(rates)} records/s in writes of 1, 8, 64")
    for path in (folder / "lines", folder / "full-wal"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    try:
        Journal.open(folder / "lines")
    except InputError as error:
        print(f"lines, a changed byte: {error}")
    (folder / "copy").write_bytes((folder / "full").read_bytes())
    (folder / "copy-wal").write_bytes((folder / "full-wal").read_bytes())
    (count,) = sqlite3.connect(folder / "copy").execute("select count(*) from records").fetchone()
    print(f"SQLite, a changed byte: no error, {count} of {200 * 73} records")


def _sqlite(path: Path, level: str) -> Callable[[int], None]:
    link = sqlite3.connect(path, isolation_level=None)
    link.execute("pragma journal_mode=wal")
    link.execute(f"pragma synchronous={level}")
    link.execute("create table records (id integer primary key, content blob)")

    def write(n: int) -> None:
        link.execute("begin")
        link.executemany("insert into records (content) values (?)", [(RECORD,)] * n)
        link.execute("commit")

    return write


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--files", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        if given.files:
            files(Path(folder))
            return
        print("    1/s  p50 ms  p90 ms  p99 ms  CPU ms of a change")
        with service("--workers", "1", "--state", folder) as running:
            asyncio.run(over_http(running, given.seconds, given.connections, given.hosts))


if __name__ == "__main__":
    main()
