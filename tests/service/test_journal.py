"""Live clusters and their journals: replay, ids, kills, damage, full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from depth import depth
from hypothesis import settings, stateful
from hypothesis import strategies as st
from starlette.testclient import TestClient

from benchmarks.service.hostile import damaged, fault
from optsched import plan
from optsched.bandwidth import Cluster, ClusterState, HostType
from optsched.errors import Infeasible, InputError
from optsched.plan.snapshot import from_tree
from optsched.service import live as live_module
from optsched.service.app import create_app
from optsched.service.changes import Change, Conflict
from optsched.service.journal import Journal, StorageError
from optsched.service.live import Create, Live, LiveCluster
from optsched.service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CLUSTER = Cluster.uniform(HostType("h", 4, nic_rate=50.0), 3)
SNAPSHOT = json.loads(plan.ClusterSnapshot(ClusterState.idle(CLUSTER), quotas={"g": 5}).to_json())


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCluster]:
    """A cluster of twelve GPUs."""
    found = LiveCluster.create(tmp_path / "c.journal", Create(id="create", snapshot=SNAPSHOT))
    yield found
    found.close()


def make(live: LiveCluster, **given: Any) -> dict[str, Any]:
    """Make one change and return its answer."""
    (answer,) = live.commit([Change(**given)])
    if isinstance(answer, Exception):
        raise answer
    found: dict[str, Any] = json.loads(answer)
    return found


def seen(live: LiveCluster) -> Any:
    """All that a replay must restore."""
    status = live.status
    jobs = {one.name: (one.gpus, one.demand) for one in status.state.jobs}
    return (status.version, status.state.free, status.state.down, jobs, status.jobs,
            {key: one[0] for key, one in live._answers.items()})  # fmt: skip


NAMES = st.sampled_from("abcde")
GPU = st.integers(0, 11)


class Machine(stateful.RuleBasedStateMachine):
    """A journal that is read again at any time, and rewritten often, next to plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "c.journal"
        self.live = LiveCluster.create(path, Create(id="create", snapshot=SNAPSHOT))
        self.held: dict[str, set[int]] = {}
        self.waiting: dict[str, int] = {}
        self.group: dict[str, str] = {}
        self.down: set[int] = set()
        self.version = 0
        self.last: tuple[Change, dict[str, Any]] | None = None

    def _make(self, fails: bool, **given: Any) -> dict[str, Any]:
        request = Change(id=f"i{self.version}", version=self.version, **given)
        if fails:
            before = seen(self.live)
            with pytest.raises((InputError, Infeasible)):
                make(self.live, **{"id": request.id} | given)
            assert seen(self.live) == before
            return {}
        (answer,) = self.live.commit([request])
        assert isinstance(answer, bytes), answer
        self.version += 1
        self.last = request, json.loads(answer)
        assert self.last[1]["version"] == self.version
        return self.last[1]

    def _free(self) -> set[int]:
        return set(range(12)).difference(self.down, *self.held.values())

    @stateful.rule(name=NAMES, gpus=st.integers(1, 6), group=st.sampled_from(["", "g"]))
    def start(self, name: str, gpus: int, group: str) -> None:
        """The job gets free GPUs, or the request is refused."""
        used = sum(len(had) for one, had in self.held.items() if self.group[one] == "g")
        fails = name in self.held or gpus > len(self._free()) or (group == "g" and used + gpus > 5)
        job = plan.PlanJob(name=name, gpus=gpus, group=group)
        answer = self._make(fails, start=[job])
        if not fails:
            got = {*CLUSTER.parse(answer["started"][name]["gpus"])}
            assert len(got) == gpus and got <= self._free()
            self.held[name], self.group[name] = got, group
            self.waiting.pop(name, None)

    @stateful.rule(name=NAMES, gpus=st.integers(1, 6))
    def submit(self, name: str, gpus: int) -> None:
        """Facts of a running job must agree with its GPUs."""
        fails = name in self.held and len(self.held[name]) != gpus
        self._make(fails, submit=[plan.PlanJob(name=name, gpus=gpus, time_left=7)])
        if not fails:
            self.group[name] = ""
            self.waiting |= {name: gpus} if name not in self.held else {}

    @stateful.rule(names=st.lists(NAMES, min_size=1, max_size=2))
    def give(self, names: list[str]) -> None:
        """All of them end or wait no longer, or none."""
        fails = len({*names}) < len(names) or not self.held.keys() | self.waiting.keys() >= {*names}
        self._make(fails, give=names)
        for name in () if fails else names:
            self.held.pop(name, None) or self.waiting.pop(name, None)

    @stateful.rule(gpus=st.sets(GPU, min_size=1, max_size=3), up=st.booleans())
    def fail_or_repair(self, gpus: set[int], up: bool) -> None:
        """Jobs keep what is left of their GPUs."""
        self._make(False, **{"repair" if up else "fail": CLUSTER.written(gpus)})
        self.down = self.down - gpus if up else self.down | gpus
        self.held = {name: left for name, had in self.held.items() if (left := had - self.down)}

    @stateful.rule(wanted=st.dictionaries(NAMES, st.sets(GPU, min_size=1, max_size=4), min_size=1))
    def place(self, wanted: dict[str, set[int]]) -> None:
        """Jobs swap GPUs in one change."""
        kept = [had for name, had in self.held.items() if name not in wanted]
        free = set(range(12)).difference(self.down, *kept)
        sizes = {**self.waiting, **{name: len(had) for name, had in self.held.items()}}
        fails = sum(map(len, wanted.values())) > len(set().union(*wanted.values()))
        fails |= any(sizes.get(name) != len(gpus) for name, gpus in wanted.items())
        fails |= not free >= set().union(*wanted.values())
        self._make(fails, place={name: CLUSTER.written(gpus) for name, gpus in wanted.items()})
        if not fails:
            self.held |= wanted
            self.waiting = {n: k for n, k in self.waiting.items() if n not in wanted}

    @stateful.precondition(lambda self: self.last is not None)
    @stateful.rule()
    def repeat(self) -> None:
        """The same id gets the same answer; with another body or another version a refusal."""
        assert self.last is not None
        request, answer = self.last
        before = seen(self.live)
        other = Change(id=request.id, give=["nothing"])
        stale = Change(id="stale", version=self.version - 1, fail="n01")
        first, second, third = self.live.commit([request, other, stale])
        assert isinstance(first, bytes) and json.loads(first) == answer
        assert isinstance(second, Conflict) and "another request" in str(second)
        assert second.value == request.id
        assert isinstance(third, Conflict) and third.value == self.version
        assert seen(self.live) == before

    @stateful.rule()
    def restart(self) -> None:
        """The journal restores everything."""
        before, path = seen(self.live), self.live._journal.path
        self.live.close()
        self.live = LiveCluster.open(path)
        assert seen(self.live) == before

    @stateful.invariant()
    def agrees(self) -> None:
        """The state is that of the plain sets."""
        state = self.live.status.state
        assert {job.name: {*job.gpus} for job in state.jobs} == self.held
        assert {*state.down} == self.down and {*state.free} == self._free()
        snapshot = self.live.status.snapshot("c")
        assert {job.name: job.gpus for job in snapshot.waiting} == self.waiting
        assert self.live.status.version == self.version

    def teardown(self) -> None:
        """Close the files."""
        self.live.close()
        self.folder.cleanup()


def test_changes_against_plain_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of changes, repeats and restarts; a journal is rewritten after six changes."""
    monkeypatch.setattr(live_module, "IDS", 3)
    limits = settings(max_examples=depth(25, 400), stateful_step_count=25, deadline=None)
    stateful.run_state_machine_as_test(Machine, settings=limits)


def test_every_prefix_of_a_journal_and_every_damaged_byte(live: LiveCluster) -> None:
    """A cut file has the changes of its whole lines; a changed one is refused with the line."""
    path = live._journal.path
    after = {path.stat().st_size: seen(live)}
    for k in range(4):
        job = plan.PlanJob(name=f"j{k}", gpus=2, group="g")
        live.commit([Change(id=f"a{k}", start=[job]), Change(id=f"b{k}", give=[f"j{k}"])])
        after[path.stat().st_size] = seen(live)
    data, ends = path.read_bytes(), sorted(after)
    other = path.with_name("other") / path.name
    other.parent.mkdir()
    for cut in range(ends[-2] - 2, len(data) + 1):
        other.write_bytes(data[:cut])
        again = LiveCluster.open(other)
        again.close()
        end = max(end for end in ends if end <= cut)
        assert seen(again) == after[end]
        assert other.read_bytes() == data[:end]
    for cut in (0, 1, ends[0] - 1):
        other.write_bytes(data[:cut])
        with pytest.raises(InputError, match=r"c.journal:1: damaged"):
            LiveCluster.open(other)
    for at in range(ends[2] - 3, len(data), 7):
        other.write_bytes(data[:at] + bytes([data[at] ^ 5]) + data[at + 1 :])
        line = 2 + sum(end <= at for end in ends[1:])
        with pytest.raises(InputError, match=rf"c.journal:{line}: damaged.*head -n {line - 1} "):
            LiveCluster.open(other)
    lines = data.splitlines(keepends=True)
    for wrong in (lines[:2] + lines[3:], [*lines, lines[-1]], [lines[0], lines[2], lines[1]]):
        other.write_bytes(b"".join(wrong))
        with pytest.raises(InputError, match="damaged"):
            LiveCluster.open(other)


def test_full_disks_change_nothing(live: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is never ahead of the journal, and the id is not used up."""
    make(live, id="1", fail="n01:0")
    before, path = seen(live), live._journal.path
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    start: dict[str, Any] = {"id": "2", "start": [plan.PlanJob(name="a", gpus=2)]}
    for name, call in (("os.write", full), ("optsched.service.journal._sync", broken)):
        with monkeypatch.context() as patch:
            patch.setattr(name, call)
            for _ in range(2):
                found = live.commit([Change(**start), Change(id="3", give=["a"])])
                assert all(isinstance(one, StorageError) for one in found)
                assert seen(live) == before
    assert make(live, **start)["version"] == 2
    with monkeypatch.context() as patch:  # a journal that cannot be rewritten goes on
        patch.setattr(live_module, "IDS", 1)
        patch.setattr(Journal, "create", lambda *_: (_ for _ in ()).throw(StorageError("full")))
        make(live, id="4", give=["a"])
    again = LiveCluster.open(path)
    again.close()
    assert seen(again) == seen(live)
    path.rename(path.with_name("moved"))
    with pytest.raises(StorageError):
        make(live, id="5", fail="n02")
    path.with_name("moved").rename(path)


def test_folders(tmp_path: Path) -> None:
    """One service a folder; journals of another cluster or version are refused."""
    first = Live(tmp_path)
    asyncio.run(_share_writes(first))
    code = (
        "import sys, pathlib; from optsched.service.live import *; Live(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert "another service uses this folder" in done.stderr
    with pytest.raises(InputError, match="another service"):
        Live(tmp_path)
    first.close()
    path, other = tmp_path / "c.journal", tmp_path / "d.journal"
    path.rename(other)
    with pytest.raises(InputError, match=r"d.journal:1: name: the .* \"c\"; rename .* c.journal"):
        Live(tmp_path)
    content = Journal.open(other)[1][0].replace(b"journal/1", b"journal/2")
    Journal.create(other, content).close()
    with pytest.raises(InputError, match="newer"):
        Live(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written \(a file, expected a folder\)"):
        Live(other)


async def _share_writes(live: Live) -> None:
    await live.create("c", Create(id="x", snapshot=SNAPSHOT))
    changes = [Change(id=f"{k}", fail="n01:0") for k in range(300)]
    found = await asyncio.gather(*map(live.clusters["c"].change, changes))
    assert [json.loads(one)["version"] for one in found] == [*range(1, 301)]
    assert (live.folder / "c.journal").read_bytes().count(b"\n") < 30


def test_endpoints(tmp_path: Path) -> None:
    """Answers, refusals by status and field, and the same after the application has ended."""
    live = Live(tmp_path)
    app = create_app(Settings(workers=1), live)
    create = {"id": "x", "snapshot": SNAPSHOT}
    start = {"id": "1", "start": [{"name": "a", "gpus": 3}], "version": 0}
    with TestClient(app, base_url="http://localhost") as client:

        def post(path: str, **body: Any) -> tuple[int, Any]:
            reply = client.post(f"/v1/clusters/{path}", json=body)
            found = reply.json()
            return reply.status_code, found.get("error", {}).get("field", found)

        for _ in range(2):
            assert post("c", **create) == (200, {"version": 0, "free": 12})
            assert post("c/changes", **start)[1]["free"] == 9
        (tmp_path / "e.journal").touch()
        for path, body, expected in (
            ("c", create | {"id": "y"}, (409, "name")), (".c", create, (400, "name")),
            ("c" * 65, create, (400, "name")), ("e", create, (400, "name")),
            ("d/changes", start, (404, "name")), ("d/plan", {}, (404, "name")),
            ("c/changes", start | {"id": "1", "version": 1}, (409, "id")),
            ("c/changes", start | {"id": "2"}, (409, "version")),
            ("c/changes", {"id": "3"}, (400, "change")),
            ("c/changes", {"id": "4", "start": [{"name": "b", "gpus": 10}]}, (409, "start[0]")),
            ("c/changes", {"id": "5", "place": {"a": "n01"}}, (400, "place.a")),
            ("c/changes", {"id": "6", "submit": [{"name": "b", "gpus": 3}],
                           "place": {"b": "n01:0-2"}}, (400, "place.b")),
            ("c/changes", {"id": "7", "fail": "n99"}, (400, "fail")),
            ("c/changes", {"id": "8", "repair": "n01:0-99"}, (400, "repair")),
            ("c/plan", {"snapshot": {}}, (400, "body")),
        ):  # fmt: skip
            assert post(path, **body) == expected, (path, body)
        for parts, field, value, text in (
            ({"submit": [{"name": "d", "gpus": 2}] * 2}, "submit[1].name", "d", "'d' appears"),
            ({"submit": [{"name": "d", "gpus": 1}], "start": ["d", "d"]}, "start[1]", "d", "twice"),
            ({"submit": [{"name": "", "gpus": 2}]}, "submit[0].name", "", "expected a name"),
            ({"submit": [{"name": "d", "gpus": 8, "pod": 3}]}, "submit[0].pod", 3, "multiple"),
            ({"start": [{"name": "d", "gpus": 1, "level": "z"}]}, "start[0].level", "z", "host"),
            ({"submit": [{"name": "a", "gpus": 4}]}, "jobs['a'].gpus", 4, "expected 3"),
            ({"place": {"a": "n01"}}, "place.a", "n01", "expected 3 GPUs, got 4"),
            ({"start": ["a"]}, "start[0]", "a", "runs already"),
        ):  # fmt: skip
            reply = client.post("/v1/clusters/c/changes", json={"id": "9"} | parts)
            error = reply.json()["error"]
            assert reply.status_code == 400 and text in error["message"], error
            assert (error["field"], error["value"]) == (field, value), error
        reply = client.delete("/v1/clusters/c")
        assert reply.headers["allow"] == "GET, HEAD, POST" and reply.status_code == 405
        assert "expected GET, HEAD, POST, got DELETE" in reply.json()["error"]["message"]
        (tmp_path / "e.journal").unlink()
        rng = random.Random(3)
        for k in range(depth(100)):
            body = start | {"id": f"f{k}", "version": 1, "fail": "n02", "place": {"a": "n01:0-2"}}
            path, body = rng.choice([("c/changes", body), ("c", create)])
            reply = client.post(f"/v1/clusters/{path}", content=damaged(rng, body))
            assert fault(reply.status_code, reply.content) == ""
        present = client.get("/v1/clusters/c").json()
        assert present["version"] == live.clusters["c"].status.version
        assert from_tree(present["snapshot"], "answer").state.jobs
        assert client.get("/v1/clusters").json() == {"c": present["version"]}
    again = Live(tmp_path)
    assert seen(again.clusters["c"]) == seen(live.clusters["c"])
    again.close()


def test_kills(tmp_path: Path) -> None:
    """Twenty kills of a loaded service: what it acknowledged is in the journal, once."""
    command = [sys.executable, "benchmarks/service/kills.py", "--kills", str(depth(20, 100)),
               "--folder", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "'kills'" in done.stdout, done.stderr[-2000:]
