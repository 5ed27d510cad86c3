"""Hostile bodies: damaged requests get an answer, or a refusal with field, value and way out.

Run: python -m benchmarks.service.hostile [--bodies 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.service.server import Connection, service
from optsched.service.queries import PATHS, QUERIES

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**30, 1e308, 0.5, "", "x", "n0:0-9999999", "\u0000", "a" * 5000,
    [], {}, [[]], [None], {"": 0}, {"file": "/etc/passwd", "sha256": ""}, "rest",
    "optsched.schedule/1", "optsched.cluster/9", [[0, -1]], [{"name": "n0"}],
)  # fmt: skip

RAW = (
    b"", b"null", b"7", b'"x"', b"[]", b"{}", b"\xff\xfe", b"\x00", b"{" * 500, b"[" * 100_000,
    b'{"a":' * 300 + b"1" + b"}" * 300, b'{"gpus": NaN}', b'{"gpus": 1e999}', b'{"gpus": Infinity}',
    b'{"gpus": 1, "gpus": 2}', b'{"id": "\\ud800"}', b"1" * 5000, b'{"gpus": ' + b"9" * 5000 + b"}",
    b'{"gpus": "' + b'\\"' * 9999 + b"[" * 70,
    b'\xef\xbb\xbf{"gpus": 2}', b"<xml/>", b"gpus=2", b'{"gpus": 2,}', b"{'gpus': 2}",
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All paths in a tree but the empty one."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def damaged(rng: random.Random, example: dict[str, Any]) -> bytes:
    """Return an example with one to three faults, or other bytes."""
    if rng.random() < 0.1:
        return rng.choice(RAW)
    tree = copy.deepcopy(example)
    for _ in range(rng.randint(1, 3)):
        known = [*places(tree)]
        if not known:
            break
        *path, last = rng.choice(known)
        node = tree
        for key in path:
            node = node[key]
        kind = rng.random()
        if kind < 0.2:
            del node[last]
        elif kind < 0.3 and isinstance(node, dict):
            node[rng.choice(("x", "", "gpu", "\u202e", "é" * 300))] = rng.choice(VALUES)
        elif kind < 0.4 and isinstance(node, list):
            node.append(copy.deepcopy(node[last]))
        else:
            node[last] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(tree).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) * rng.randint(0, 2) + text[at + 1 :]
    return text


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Names of queries and damaged bodies, without end."""
    rng = random.Random(seed)
    while True:
        name = rng.choice([*QUERIES])
        yield name, damaged(rng, QUERIES[name].example)


def fault(status: int, content: bytes) -> str:
    """Return what is wrong with an answer, or an empty text."""
    if status == 200:
        return ""
    if not 400 <= status < 500:
        return f"status {status}"
    error = json.loads(content)["error"]
    if set(error) != {"field", "value", "message"} or not error["field"]:
        return "the form of the refusal"
    if "expected" not in error["message"] and "/v1/schemas/" not in error["message"]:
        return "no way out" * (status == 400)
    return ""


async def send(port: int, seed: int, count: int, found: Counter[str]) -> None:
    """Send so many bodies over one connection."""
    connection = Connection(port)
    await connection.open()
    for _, (name, body) in zip(range(count), bodies(seed), strict=False):
        status, content = await connection.post(PATHS[name], body)
        found[f"status {status}"] += 1
        if text := fault(status, content):
            found[f"FAULT: {text}"] += 1
            print(text, name, body[:300], content[:300], flush=True)


def main() -> None:
    """Start a service and send the bodies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=100_000)
    given, found = parser.parse_args(), Counter[str]()

    async def all_of_them(port: int) -> None:
        await asyncio.gather(*(send(port, seed, given.bodies // 8, found) for seed in range(8)))

    with service() as running:
        asyncio.run(all_of_them(running.port))
    for key, n in sorted(found.items()):
        print(f"{key}: {n:,}")


if __name__ == "__main__":
    main()
