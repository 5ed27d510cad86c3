"""Messages between GPUs: streams of ranks that never wait for each other in a circle."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import combinations, permutations
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from optsched.arraypipe.distributed import ranks  # noqa: E402
from optsched.arraypipe.distributed.backend import ProcessBackend  # noqa: E402
from optsched.arraypipe.distributed.transport import (  # noqa: E402
    CreditedLinks,
    PeerLost,
)
from optsched.errors import InputError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.torch

Channel = tuple[int, int]
"""Ranks of sender and receiver."""


def circle(channels: Sequence[Channel], messages: Sequence[int], shared: bool) -> bool:
    """Whether some interleaving of the channel threads ends with ranks that wait for each other.

    Every message has three steps of the host: its header goes, then the sender launches; the
    receiver launches when it has the header. On the GPU a launch first waits for its stream, which
    waits for the receives launched on it before. `shared`: one stream for all channels of a rank.
    """
    seen: set[Any] = set()

    def stream(rank: int, c: int) -> Any:
        return rank if shared else (rank, c)

    def all_arrive(launched: tuple[tuple[Any, str, int, int], ...]) -> bool:
        """Whether every transfer ends: both sides have begun, behind receives that have ended."""
        ended: set[tuple[int, int]] = set()
        while True:
            begun: dict[tuple[int, int], int] = {}
            blocked: set[Any] = set()
            for where, side, c, m in launched:
                if where not in blocked:
                    begun[c, m] = begun.get((c, m), 0) + 1
                if side == "receive" and (c, m) not in ended:
                    blocked.add(where)
            now = {at for at, sides in begun.items() if sides == 2}
            if now <= ended:
                return len(ended) == sum(messages)
            ended |= now

    def explore(done: tuple[tuple[int, int, int], ...], launched: Any) -> bool:
        # of a shared stream the order of launches matters, of a channel's own it is given
        key = (done, launched if shared else None)
        if key in seen:
            return False
        seen.add(key)
        steps = 0
        for c, (headers, sends, receives) in enumerate(done):
            source, target = channels[c]
            for which, may in enumerate((
                headers == sends < messages[c], sends < headers, receives < headers,
            )):  # fmt: skip
                if not may:
                    continue
                steps += 1
                row = [headers, sends, receives]
                row[which] += 1
                side = ("", "send", "receive")[which]
                rank = target if side == "receive" else source
                one = ((stream(rank, c), side, c, row[which] - 1),) if side else ()
                if explore((*done[:c], (row[0], row[1], row[2]), *done[c + 1 :]), launched + one):
                    return True
        return not steps and not all_arrive(launched)

    return explore(((0, 0, 0),) * len(channels), ())


NEIGHBOURS = [(0, 1), (1, 0)]
RING = [(0, 1), (1, 2), (2, 0)]


def test_a_stream_for_all_channels_makes_a_circle() -> None:
    """Two neighbours, activations one way and gradients the other, are enough; so are three."""
    assert circle(NEIGHBOURS, [1, 1], shared=True)
    assert circle(RING, [1, 1, 1], shared=True)
    assert not circle([(0, 1)], [6], shared=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stream_for_each_makes_none(ranks: int) -> None:
    """All channels between two or three ranks, up to six messages."""
    every = list(permutations(range(ranks), 2))
    for n in range(1, 5):
        for channels in combinations(every, min(n, len(every))):
            assert not circle(channels, [6 // len(channels)] * len(channels), shared=False)


def links(**fields: Any) -> Any:
    """Links without groups."""
    made = object.__new__(CreditedLinks)
    made.__dict__.update(device=torch.device("cuda", 1), _cuda=True, _every=frozenset(), **fields)
    return made


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Streams that are only counted; the current one of each thread, and its GPU."""
    here = threading.local()

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        here.stream = stream
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    return here


def serve(made: Any, works: Sequence[Any], items: int = 2) -> list[list[Future[Any]]]:
    """A thread per channel end, each with some messages."""
    futures = []
    for work in works:
        queue: SimpleQueue[Any] = SimpleQueue()
        rows = [SimpleNamespace(done=Future()) for _ in range(items)]
        for row in (*rows, None):
            queue.put(row)
        thread = threading.Thread(target=made._loop, args=(queue, work, (0, 1, 0), None))
        thread.start()
        thread.join()
        futures.append([row.done for row in rows])
    return futures


def test_every_channel_end_has_a_stream(current: Any) -> None:
    """One for all of its messages, on the GPU of the rank and not on the first."""

    def work(*_: Any) -> Any:
        return current.stream, current.device

    rows = [[done.result() for done in row] for row in serve(links(), [work, work, work])]
    assert all(first == second for first, second in rows)
    assert len({id(row[0][0]) for row in rows}) == 3
    assert {row[0][1] for row in rows} == {torch.device("cuda", 1)}


def test_messages_behind_a_lost_one_are_lost_at_once(current: Any) -> None:
    """Nobody waits for the timeout."""

    def work(*_: Any) -> Any:
        raise PeerLost("gone")

    ((first, second),) = serve(links(), [work])
    for done in (first, second):
        with pytest.raises(PeerLost, match="gone"):
            done.result(0)


def test_a_plan_with_another_channel_is_refused() -> None:
    """Communicators are made once, by all ranks together."""
    made = links()
    made._every = frozenset([(0, 1, 0)])
    assert made.missing([(0, 1, 0), (1, 0, 1)]) == [(1, 0, 1)]


@pytest.mark.parametrize("error", [PeerLost("gone"), ValueError("wrong")])
def test_a_run_that_raises_first_ends_what_was_launched(error: Exception) -> None:
    """What the worker waits for then may be a kernel without a partner."""
    told: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: told.append(what)

    def broken(*_: Any) -> None:
        raise error

    backend: Any = object.__new__(ProcessBackend)
    backend.__dict__.update(
        links=SimpleNamespace(abort=note("abort")), course=SimpleNamespace(segments=[0], now=None),
        group=SimpleNamespace(abort=note("tell"), diagnosis=lambda *_: "lost"),
        post=SimpleNamespace(abandon=note("abandon")), _run_segment=broken,
        _whereabouts=list, _finish=note("finish"),
    )  # fmt: skip
    with pytest.raises(type(error)):
        backend.run()
    assert told[0] == "abort"
    assert told[-1] == "finish"


@pytest.mark.parametrize(
    ("there", "uuids", "devices", "found"),
    [
        (2, "", None, "cuda:1"),
        (4, "", ["cuda:2", "cuda:3"], "cuda:3"),
        (1, "ab", None, "cuda:0"),
        (1, "ab", ["cuda"], "cuda:0"),
        (1, "aa", None, "trains on CPUs: this host has 1 GPUs and 2 processes"),
        (1, "aa", ["cuda"], "2 processes share the GPU"),
        (2, "", ["cpu"], None),
        (0, "", None, None),
    ],
)
def test_the_gpu_of_a_rank(
    there: int, uuids: str, devices: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own, if launchers show it alone too; CPUs beside idle GPUs never without a word."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks.dist, "new_group", lambda backend: None)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda group: None)
    rows = [(there, uuid) for uuid in uuids]
    monkeypatch.setattr(ranks, "Group", lambda group: SimpleNamespace(all=lambda own: rows))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="")
    )
    if found is None:
        assert ranks.own_gpu(devices) is None
    elif " " not in found:
        assert ranks.own_gpu(devices) == torch.device(found)
    elif devices:
        with pytest.raises(InputError, match=found):
            ranks.own_gpu(devices)
    else:
        with pytest.warns(UserWarning, match=found):
            assert ranks.own_gpu(devices) is None
