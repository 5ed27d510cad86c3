"""Messages between GPUs: streams of ranks that never wait for each other in a circle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import combinations, permutations
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from optsched.arraypipe import training_run
from optsched.arraypipe.distributed import ranks, transport
from optsched.arraypipe.distributed.backend import ProcessBackend
from optsched.arraypipe.distributed.transport import CreditedLinks, PeerLost
from optsched.arraypipe.runtime import environment
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


def lost(**given: Any) -> tuple[Any, list[str]]:
    """A backend whose run raises, and what is called of it."""
    told: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: told.append(what)

    backend: Any = object.__new__(ProcessBackend)
    backend.__dict__.update(
        links=SimpleNamespace(abort=note("abort")), course=SimpleNamespace(segments=[0], now=None),
        group=SimpleNamespace(abort=note("tell"), diagnosis=lambda *_: "lost"),
        post=SimpleNamespace(abandon=note("abandon")), _whereabouts=list,
        worker=SimpleNamespace(finish=note("finish"), memory=SimpleNamespace(copies=[])), **given,
    )  # fmt: skip
    return backend, told


@pytest.mark.parametrize("error", [PeerLost("gone"), ValueError("wrong"), KeyboardInterrupt()])
def test_a_run_that_raises_first_ends_what_was_launched(error: BaseException) -> None:
    """What the worker waits for then may be a kernel without a partner."""

    def broken(*_: Any) -> None:
        raise error

    backend, told = lost(_run_segment=broken)
    with pytest.raises(type(error)):
        backend.run()
    assert told[0] == "abort"
    assert told[-1] == "finish"


def test_an_error_that_follows_hides_no_earlier_one() -> None:
    """A GPU that has failed fails again when it is asked to finish."""

    def broken(*_: Any) -> None:
        raise ValueError("first")

    def again() -> None:
        raise RuntimeError("again")

    backend, _ = lost(_run_segment=broken)
    backend.worker.finish = again
    with pytest.raises(ValueError, match="first"):
        backend.run()


def test_communicators_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between begin and end of an NCCL group, or one waits for another; destroying would wait."""
    told: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def _get_backend(self, device: Any) -> Any:
            return SimpleNamespace(
                _group_start=lambda: told.append("start"), _group_end=lambda: told.append("end")
            )

    monkeypatch.setattr(transport, "_abort_process_group", lambda group: told.append(group.name))
    made = links()
    made._cuda, made._groups = True, [Group("a"), Group("b")]
    made.abort()
    made.abort()
    assert told == ["start", "a", "b", "end"]


def test_the_watchdog_leaves_the_end_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it ends the process before there is a sentence."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(transport.GlooLinks, "__init__", lambda self, timeout: None)
    CreditedLinks(1.0, [], torch.device("cuda", 0))
    assert transport.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize("started", [False, True])
def test_queues_are_set_before_cuda_starts(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of `torchrun`; where CUDA was quicker, a warning says what to do."""
    for key in environment.SETTINGS:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    environment.set_queues()
    assert [key in environment.os.environ for key in environment.SETTINGS] == [not started] * 2
    monkeypatch.setattr(ranks, "own_gpu", lambda devices: torch.device("cuda", 0))
    monkeypatch.setattr(ranks, "CreditedLinks", lambda *given: SimpleNamespace())
    monkeypatch.setattr(ranks, "lanes", lambda routes: [])
    said: list[str] = []
    for name in ("set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name: said.append(name))
    room = ranks.CUDA_CONTEXT + 7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100 + room))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = ranks.links(None, 1.0, None)  # type: ignore[arg-type]
    assert made.taken == 7 and said == ["set_device", "empty_cache"]
    assert ["before CUDA starts" in str(w.message) for w in warned] == [True] * started


def test_queues_are_set_in_processes_of_torchrun() -> None:
    """By the import, because already to ask for GPUs starts CUDA."""
    code = "import os, optsched.arraypipe.trainer; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    given = {k: v for k, v in os.environ.items() if k not in environment.SETTINGS}
    for more, code_of_end in (({"RANK": "0"}, 0), ({}, 1)):
        env = {k: v for k, v in given.items() if k != "RANK"} | more
        ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        assert ended.returncode == code_of_end


def test_blocks_have_the_times_of_their_gpu() -> None:
    """When they are over; and what they waited for their state is not theirs."""
    rows = [(0, 1, 2, 3, 50, 60, 4), (0, 1, 3, 4, 61, 62, 5)]
    pending = [(0, 500, 900, 7), None]
    backend: Any = object.__new__(ProcessBackend)

    class Pending:
        def __len__(self) -> int:
            return len(pending)

        def read(self) -> Any:
            return pending.pop(0)

    backend.__dict__.update(
        times=Pending(), past=SimpleNamespace(rows=rows, exposed_ns=[0, 0]),
        worker=SimpleNamespace(memory=SimpleNamespace(moves=True)),
    )  # fmt: skip
    backend.read_times(1)
    assert rows[0] == (0, 1, 2, 3, 500, 900, 4) and backend.past.exposed_ns == [7, 0]
    backend.read_times()
    assert not pending and rows[1] == (0, 1, 3, 4, 61, 62, 5)


def test_a_plan_without_its_channels_is_not_adopted() -> None:
    """The sentence of the links is what the planner hears."""
    found: Any = object.__new__(ranks.Ranks)
    found.links = SimpleNamespace(missing=lambda lanes: [(1, 0, 1)])
    routes = SimpleNamespace(channels=[])
    sentence = found.unserved(SimpleNamespace(routes=routes))
    assert "messages of gradient from rank 1 to rank 0" in sentence
    run: Any = object.__new__(training_run.ArrayRun)
    run.ranks = SimpleNamespace(unserved=lambda segment: "no channel", held=None)
    run.worker = SimpleNamespace(memory=SimpleNamespace(moves=False))
    run.course = SimpleNamespace(segment=lambda change: None)
    assert run._refusal(None, {}) == "no channel"


@pytest.mark.parametrize(
    ("rows", "devices", "found"),
    [
        # GPUs there, chosen, kind named; of all ranks, the first is this one
        ([(2, "a"), (2, "b")], None, "cuda:0"),
        ([(4, "a"), (4, "b")], ["cuda:2", "cuda:3"], "cuda:2"),
        ([(1, "a"), (1, "b")], None, "cuda:0"),
        ([(1, "a"), (1, "b")], ["cuda"], "cuda:0"),
        ([(1, "a"), (1, "a")], None, "trains on CPUs: this host has 1 GPUs and 2 processes"),
        ([(1, "a"), (0, "")], None, "trains on CPUs: this host has 1 GPUs"),
        ([(0, ""), (1, "a")], None, None),
        ([(1, "a"), (1, "a")], ["cuda"], "rank 1 sees 1 and takes GPU a"),
        ([(2, "a"), (2, "a")], ["cuda:0", "cuda:0"], "needs a GPU of its own"),
        ([(2, ""), (2, "")], ["cuda:5", "cuda:6"], "rank 0 sees 2 and takes none"),
        ([(2, "a"), (2, "b")], ["cpu"], None),
        ([(0, ""), (0, "")], None, None),
    ],
)
def test_the_gpu_of_a_rank(
    rows: Any, devices: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own, if launchers show it alone too; CPUs beside idle GPUs never without a word.

    All ranks decide by the same rows, whatever each of them sees.
    """
    there, uuid = rows[0]
    kind = None if devices is None else torch.device(devices[0]).type

    def everybody(own: Any, group: Any) -> Any:
        assert own == (there, "" if kind == "cpu" else uuid, kind)
        return [(n, "" if kind == "cpu" else u, kind) for n, u in rows]

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ranks.dist, "new_group", lambda backend: None)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(
        ranks, "Group", lambda group: SimpleNamespace(all=lambda own: everybody(own, group))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
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
