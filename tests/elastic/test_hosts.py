"""Workers of other hosts: two network namespaces, deaths, wrong tokens, hostile connections."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
import torch
from program import PATIENCE

from optsched import InputError
from optsched.elastic import OpenPool, door, read_checkpoint, run
from optsched.elastic.job import read_jobs
from optsched.elastic.remote import join
from optsched.elastic.workers import Processes, StopSign, hello
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN = "a secret of a test"
MODEL = """
import time, torch

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)

def data():
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    return Slow(x[::2], y[::2]), Slow(x[1::2], y[1::2])

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Dropout(0.3), torch.nn.Linear(9, 2))

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
"""
JOBS = """
[[jobs]]
name = "wide"
model = "model.py:model"
data = "model.py:data"
optimizer = "model.py:optimizer"
sizes = [2]
passes = 25
"""


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts on a cable, 10.79.0.1 and 10.79.0.2; they are removed at the end."""
    names = f"optsched-a{os.getpid()}", f"optsched-b{os.getpid()}"
    lines = [f"netns add {name}" for name in names]
    lines.append(f"link add v0 netns {names[0]} type veth peer name v0 netns {names[1]}")
    for k, name in enumerate(names, 1):
        lines += [f"-n {name} addr add 10.79.0.{k}/24 dev v0", f"-n {name} link set v0 up"]
        lines.append(f"-n {name} link set lo up")
    try:
        for line in lines:
            done = shutil.which("ip") and subprocess.run(
                ["ip", *line.split()], capture_output=True, check=False
            )
            if not done or done.returncode:
                pytest.skip("network namespaces are not permitted here")
        yield names
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Program:
    """`optsched cluster elastic` in a namespace; its lines can be awaited."""

    def __init__(self, namespace: str, *words: object) -> None:
        code = "import sys; from optsched.cli import main; sys.exit(main())"
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code]
        self.process = subprocess.Popen(
            [*command, "cluster", "elastic", *map(str, words)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, pattern: str) -> None:
        """Read up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        """Read the other lines; return the exit code."""
        self.lines.append(self.process.communicate(timeout=PATIENCE)[0])
        return self.process.returncode


@pytest.mark.slow
def test_a_worker_of_another_host_dies_and_is_replaced(
    namespaces: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process, then the whole command, are killed; the bits are those of one host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(door.TOKEN, TOKEN)
    Path("model.py").write_text(MODEL)
    Path("jobs.toml").write_text(JOBS)
    here, there = namespaces
    place = "10.79.0.1:29400"
    pool = Program(
        here, "jobs.toml", "--slots", 2, "--listen", place, "--folder", "run", "--preempt", "pass"
    )
    pool.until("starting the workers")
    other = Program(there, "--join", place)
    other.until("joined")
    pool.until("running .*pass")
    os.kill(int(other.lines[-1].split()[2]), signal.SIGKILL)
    other.until("joined")
    pool.until("joining")
    pool.until("running .*pass")
    other.process.kill()
    other.end()
    pool.until("pending")
    other = Program(there, "--join", place)
    assert pool.end() == 0, pool.lines
    assert other.end() == 0 and "has ended" in "".join(other.lines)
    run(read_jobs("jobs.toml"), 2, folder="alone")
    found, expected = (
        read_checkpoint(Path(folder, "wide", "checkpoint.pt"), "wide")
        for folder in ("run", "alone")
    )
    assert found["log"] == expected["log"]
    assert all(torch.equal(found["model"][key], value) for key, value in expected["model"].items())


@pytest.fixture
def gate() -> Iterator[tuple[door.Door, str]]:
    """A door at a free port of this host, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    made = door.Door(OpenPool(2, 1, place, TOKEN), "", lambda: None)
    yield made, place
    made.close()


def test_strangers_stay_outside(
    gate: tuple[door.Door, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong tokens, other bytes, nothing at all, too many of them; a worker still comes in."""
    made, place = gate
    real, failures = made._socket, [OSError(errno.EMFILE, "Too many open files")]

    def accept() -> Any:
        if failures:
            raise failures.pop()
        return real.accept()

    given = SimpleNamespace(
        accept=accept, fileno=real.fileno, shutdown=real.shutdown, close=real.close
    )
    monkeypatch.setattr(made, "_socket", given)
    address = door.address_of("join", place)
    idle = socket.create_connection(address)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 8, b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(noise)
    with pytest.raises(InputError, match="token: is not that of the pool"):
        join(place, ["cpu"], "another secret of 20")
    threading.Thread(target=lambda: made.arrived.get()[0].send({"modules": []})).start()
    connection, welcome = door.connect(address, TOKEN.encode(), hello("cpu"))
    assert welcome == {"modules": []} and made.arrived.empty() and not failures
    assert door.hung_up(connection, PATIENCE)
    connection.close()
    idle.close()


@pytest.mark.parametrize("orderly", [True, False])
def test_the_end_of_a_pool_and_its_death_differ(
    gate: tuple[door.Door, str], tmp_path: Path, orderly: bool
) -> None:
    """A worker returns after the end of the run; after a death it is an error with a way out."""
    made, place = gate
    (tmp_path / ".lock").touch()
    store: Any = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def pool() -> None:
        pipe, _ = made.arrived.get()
        setting = {"modules": [], "store": ("127.0.0.1", store.port), "interface": ""}
        pipe.send({"folder": str(tmp_path), **setting})
        assert pipe.recv() == ("ready",)
        made.close()
        if orderly:
            pipe.send(("end",))
        pipe.close()

    thread = threading.Thread(target=pool)
    thread.start()
    if orderly:
        join(place, ["cpu"], TOKEN)
    else:
        with pytest.raises(OptschedError, match=r"is gone before the end of its run; .*--resume"):
            join(place, ["cpu"], TOKEN)
    thread.join()


def test_pools_take_workers_of_their_kind() -> None:
    """The same versions and devices, while there are slots; the answer names the difference."""
    pool = Processes(["cpu", ""], [])
    right = hello("cpu")
    assert pool._refusal(right) == ""
    for change, message in [
        ({"optsched": "0"}, "optsched .*, this host 0; install the same"),
        ({"torch": "1"}, "torch .*, this host 1"), ({"device": "cuda:0"}, "of kind cpu"),
    ]:  # fmt: skip
        assert re.search(message, pool._refusal(right | change))
    pool.vacant = set()
    assert "--remote" in pool._refusal(right)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: join("127.0.0.1:1", ["cpu"], TOKEN), "join: .*refused; start the pool first"),
        (lambda: join("host", ["cpu"], TOKEN), "join: expected HOST:PORT"),
        (lambda: join("0.0.0.0:99", ["cpu"], TOKEN), "join: expected HOST:PORT"),
        (lambda: join("a:99999999999", ["cpu"], TOKEN), "join: port: expected"),
        (lambda: join("a:9", ["cpu"], "short"), "token: set OPTSCHED_TOKEN"),
        (
            lambda: door.Door(OpenPool(1, 1, "192.0.2.1:99", TOKEN), "", print),
            "listen: 192.0.2.1:99: ",
        ),
    ],
)
def test_wrong_addresses_and_tokens(call: Callable[[], Any], message: str) -> None:
    """One line with the field and what to do."""
    with pytest.raises(InputError, match=message):
        call()


def test_a_file_in_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the run, or of a job in it; and an open pool without a folder."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("jobs.toml").write_text(JOBS)
    jobs = read_jobs("jobs.toml")
    Path("file").touch()
    Path("run").mkdir()
    Path("run/wide").touch()
    for folder in ("file", "run"):
        with pytest.raises(InputError, match=r"folder: .* cannot be used"):
            run(jobs, 2, folder=folder)
    with pytest.raises(InputError, match="remote: name a folder that all hosts see"):
        run(jobs, OpenPool(2, 1, "127.0.0.1:29400", TOKEN))


def test_ranks_agree_on_the_last_step() -> None:
    """However threads interleave: no rank starts a step beyond the limit, and all may reach it."""
    store = torch.distributed.HashStore()
    for trial in range(30):
        signs = [StopSign(store, f"{trial}") for _ in range(4)]
        signs[0].reset()
        started: list[list[int]] = [[], [], []]

        def train(rank: int, signs: Any = signs, started: Any = started) -> None:
            step = 0
            while signs[rank].may_start(step):
                started[rank].append(step)
                step += 1

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        signs[3].set_limit()
        for thread in threads:
            thread.join()
        limit = int(store.get(f"{trial}/stop").decode().rstrip("!"))
        assert started == [[*range(limit + 1)]] * 3
