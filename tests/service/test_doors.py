"""Clients, Slurm's plugin, the update of a cluster, manifests and the container file, served."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import typer.main
import yaml
from hypothesis import given
from hypothesis import strategies as st
from program import PROGRAM
from test_extender import node, pod

from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Host, HostType
from optsched.cli.app import app as commands
from optsched.errors import Infeasible, InputError
from optsched.plan import ClusterSnapshot, PlanJob
from optsched.service.app import create_app
from optsched.service.changes import Change, Decision
from optsched.service.client import Client, Refused, Unavailable
from optsched.service.extender import LEVEL, PODS
from optsched.service.known import Status
from optsched.service.live import Live
from optsched.service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOKEN = "a-token-of-20-letters"
CLUSTER = Cluster(
    tuple(Host(f"n{i}", "h100", (f"r{i // 2}",)) for i in range(4)),
    (HostType("h100", 8, nic_rate=50.0),), ("rack",), uplinks={"rack": 50.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a served process with a token."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "token").write_text(TOKEN + "\n")
    words = ["serve", "--port", "0", "--workers", "1", "--token-file", "token", "--state", "state"]
    process = subprocess.Popen([*PROGRAM, *words], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    yield line.split()[2]
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client with the token."""
    with Client(url, token=TOKEN) as made:
        yield made


@pytest.fixture
def cluster(client: Client, request: Any) -> str:
    """Name of a new live cluster, all GPUs free."""
    name = re.sub("[^a-z_]", "-", request.node.name)
    assert client.create(name, ClusterSnapshot(ClusterState.idle(CLUSTER))) == 0
    return name


def test_python_client(client: Client, cluster: str, url: str) -> None:
    """Takes are answered once, refusals are the library's errors with field and value."""
    job = PlanJob(name="a", gpus=16, pod=8, level="rack")
    first = client.take(cluster, job, id="take-1")
    assert first == client.take(cluster, job, id="take-1")  # sent again
    assert CLUSTER.parse(first.gpus) and client.read(cluster)["free"] == 16
    with pytest.raises(Infeasible, match=r"^start\[0\]: 'b': needs 17 GPUs, free are 16"):
        client.take(cluster, {"name": "b", "gpus": 17})
    with pytest.raises(Refused, match="expected") as error:
        client.take(cluster, {"name": "b", "gpus": "x"})
    assert error.value.field.startswith("start") and error.value.status == 400
    with pytest.raises(Refused) as error:
        client.change(cluster, version=99, give=["a"])
    assert error.value.status == 409
    client.give(cluster, "a")
    assert client.read(cluster)["free"] == 32
    shop = {"problem": {"format": "optsched.jobshop/1", "jobs": [[[0, 3], [1, 2]]]}}
    with pytest.raises(InputError):
        client.query("solve", **shop, time_limit="long")
    with pytest.raises(Refused, match="token") as error:
        Client(url, token="another-token-of-20").read(cluster)
    assert error.value.status == 401
    for wrong in ({"bandwidth": float("nan")}, {"level": object()}):
        with pytest.raises(InputError, match="body: expected JSON"):
            client.take(cluster, {"name": "b", "gpus": 1, **wrong})
    for wrong in ({"url": "localhost"}, {"token": "a\nb"}, {"timeout": 0}, {"retries": True}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}: expected"):
            Client(**wrong)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="tried 2 times"):
        Client("http://127.0.0.1:9", retries=1).read(cluster)


def test_client_sends_again_until_answered(client: Client, cluster: str) -> None:
    """Lost answers: the change is sent again with its id and applied once."""
    send, lost = client._http.request, []

    def unreliable(*given: Any, **more: Any) -> Any:
        answer = send(*given, **more)
        if len(lost) < 2:
            lost.append(more["content"])
            raise httpx.ReadError("connection lost")
        return answer

    client._http.request = unreliable  # type: ignore[method-assign]
    got = client.take(cluster, {"name": "a", "gpus": 8})
    assert got.gpus and lost[0] == lost[1]
    version = client.read(cluster)["version"]
    assert version == 1


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go compiler")
def test_go_client(url: str, cluster: str, tmp_path: Path) -> None:
    """The example compiles without dependencies, takes GPUs, sends again, and gives back."""
    folder = shutil.copytree(EXAMPLES / "go", tmp_path / "client")
    done = subprocess.run(
        ["go", "run", ".", url, cluster], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OPTSCHED_TOKEN": TOKEN},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "24 GPUs are free" in done.stdout and "32 GPUs are free" in done.stdout


LUA = """
slurm = {SUCCESS = 0, NO_VAL = 4294967294}
function slurm.log_user(text, ...) print("user: " .. string.format(text, ...)) end
slurm.log_info = slurm.log_user
assert(dofile(arg[1]) == 0)
for _, text in ipairs({"8 2", "8 3", "4 2"}) do
  local each, nodes = text:match("(%d) (%d)")
  local job = {comment = "optsched", tres_per_node = "gres/gpu:h100:" .. each,
               min_nodes = tonumber(nodes)}
  assert(slurm_job_submit(job, {}, 1000) == 0)
  print(tostring(job.req_nodes))
end
for kind, switches in pairs({h100 = 1, h200 = 0}) do
  local job = {comment = "optsched", tres_per_job = "gres/gpu:" .. kind .. "=8",
               req_switch = switches}
  assert(slurm_job_submit(job, {}, 1000) == 0)
end
local job = {tres_per_job = "gres/gpu=8"}
assert(slurm_job_submit(job, {}, 1000) == 0 and job.req_nodes == nil)
for _, given in ipairs({
  {tres_per_node = "gres/gpu:h100'; touch " .. arg[2] .. "; ':8"},
  {tres_per_job = 'gres/gpu:h100", "pod": 1, "level": "host=8'},
  {tres_per_node = "gres/gpu:h100:4,gres/gpu:a100:4"}, {tres_per_node = "gres/gpumem:8"},
  {array_inx = "0-9"}, {dependency = "afterok:7"}, {exc_nodes = "n3"}, {features = "nvme"},
  {reservation = "maintenance"}, {begin_time = os.time() + 3600}, {priority = 0},
  {tres_per_node = "gres/gpu:8", tres_per_job = "gres/gpu:12"},
  {tres_per_node = "gres/gpu:8", tres_per_job = "gres/gpu:16", min_nodes = 1, max_nodes = 1},
  {min_nodes = 3}, {tres_per_job = "gres/gpu:16", max_nodes = 1},
}) do
  given.comment = "optsched"
  if not given.tres_per_node then given.tres_per_job = given.tres_per_job or "gres/gpu:h100:2" end
  assert(slurm_job_submit(given, {}, 1000) == 0 and given.req_nodes == nil)
end
print("together")
local job = {comment = "optsched", tres_per_node = "gres/gpu:8", tres_per_job = "gres/gpu:h100:16",
             min_nodes = slurm.NO_VAL, max_nodes = slurm.NO_VAL, begin_time = 0, array_inx = ""}
assert(slurm_job_submit(job, {}, 1000) == 0 and job.min_nodes == 2)
print(job.req_nodes)
"""


@pytest.mark.skipif(not (shutil.which("lua5.4") or shutil.which("luajit")), reason="no Lua")
def test_job_submit_plugin(url: str, cluster: str, client: Client, tmp_path: Path) -> None:
    """Nodes of one rack, a reason, and the original request where fewer nodes would do.

    Nothing of a job gets into the shell or the body; other nodes or later times leave it unchanged.
    """
    (tmp_path / "header").write_text(f"Authorization: Bearer {TOKEN}")
    (tmp_path / "run.lua").write_text(LUA)
    lua = shutil.which("lua5.4") or shutil.which("luajit") or ""
    done = subprocess.run(
        [lua, tmp_path / "run.lua", EXAMPLES / "slurm" / "job_submit.lua", tmp_path / "hole"],
        capture_output=True, text=True, timeout=60, env=os.environ | {
            "OPTSCHED_HEADER": str(tmp_path / "header"),
            "OPTSCHED_URL": f"{url}/v1/clusters/{cluster}/changes",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] in ("n0,n1", "n2,n3") and lines[0] == f"user: optsched: runs on {lines[1]}"
    assert "needs" in lines[2] and "free are" in lines[2] and lines[3:5] == ["nil", "nil"]
    assert client.read(cluster)["free"] == 0 and not (tmp_path / "hole").exists()
    assert {lines[1], lines[-1]} == {"n0,n1", "n2,n3"} and lines[-3] == "together"
    for text in ("type: expected one of h100, got", "level: expected one of rack, host, got"):
        assert any("optsched: status 400" in line and text in line for line in lines[5:]), lines


@functools.cache
def sync() -> Any:
    """The example that updates live clusters, as a module."""
    spec = importlib.util.spec_from_file_location("sync", EXAMPLES / "sync_cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state_of(owners: list[int]) -> ClusterState:
    """Owner of every GPU: 0 free, 1 down, else a job."""
    jobs: dict[str, list[int]] = {}
    for gpu, owner in enumerate(owners):
        jobs.setdefault(f"j{owner}", []).append(gpu)
    free, down = jobs.pop("j0", []), jobs.pop("j1", [])
    rows = {name: CLUSTER.written(ids) for name, ids in jobs.items()}
    return ClusterState.parse(CLUSTER, CLUSTER.written(free), rows, CLUSTER.written(down))


def counts_of(state: ClusterState) -> dict[str, list[int]]:
    """GPUs by host of every job, and those down."""
    held = {job.name: CLUSTER.counts(job.gpus).tolist() for job in state.jobs}
    return held | {"down": CLUSTER.counts(state.down).tolist()}


OWNERS = st.lists(st.integers(0, 5), min_size=32, max_size=32)


@given(OWNERS, OWNERS)
def test_updates_end_in_the_real_state(one: list[int], other: list[int]) -> None:
    """The changes lead from any state to one with the numbers of GPUs of any other, and end."""
    live, real = (ClusterSnapshot(state_of(owners), tuple(
        PlanJob(name=job.name, gpus=len(job.gpus)) for job in state_of(owners).jobs
    )) for owners in (one, other))  # fmt: skip
    decision = Decision(Status.of(live, 0, 0), BottleneckBandwidth(CLUSTER), {})
    for parts in sync().changes(live, real):
        decision.make(msgspec.convert(msgspec.to_builtins({"id": "x", **parts}), Change))
    after = decision.status.snapshot("main")
    assert counts_of(after.state) == counts_of(real.state)
    assert {job.name for job in after.jobs} == {job.name for job in real.jobs}
    assert sync().changes(after, real) == []


def test_waiting_jobs_are_updated() -> None:
    """New facts of the source are sent, costs and the time of submission stay those given."""
    idle = ClusterState.idle(CLUSTER)
    known = PlanJob(name="a", gpus=8, pod=8, priority=3, submit=77, evict=5, bandwidth=9.0)
    live = ClusterSnapshot(idle, (known, PlanJob(name="b", gpus=8)), now=100)
    decision = Decision(Status.of(live, 0, 100), BottleneckBandwidth(CLUSTER), {})
    now = PlanJob(name="a", gpus=16, pod=8, priority=1, submit=99, type="h100", level="rack")
    real = ClusterSnapshot(idle, (now, PlanJob(name="b", gpus=4)))
    (parts,) = sync().changes(live, real, sync().FACTS["kubernetes"])
    assert (parts["submit"][0].gpus, parts["submit"][0].priority) == (16, 3)
    for parts in sync().changes(live, real):
        decision.make(msgspec.convert(msgspec.to_builtins({"id": "x", **parts}), Change))
    after = decision.status.snapshot()
    one, two = after.jobs
    assert one == msgspec.structs.replace(now, submit=77, evict=5, bandwidth=9.0)
    assert two.gpus == 4 and two.submit <= 1  # not the present
    assert sync().changes(after, real) == []


def test_updates_of_large_clusters() -> None:
    """No part of a change has more entries than the service takes."""
    hosts = tuple(Host(f"m{i}", "h100") for i in range(300))
    cluster = Cluster(hosts, (HostType("h100", 8, nic_rate=50.0),))
    found = []
    for shift, down, kind in ((0, 0, "v"), (1, 8, "w")):
        held = {f"r{i}": cluster.written([i + shift]) for i in range(1100)}
        names = [*held, *(f"{kind}{i}" for i in range(1200))]
        free = {*range(2400 - down)} - {*range(shift, 1100 + shift)}
        ids = cluster.written(range(2400 - down, 2400))
        state = ClusterState.parse(cluster, cluster.written(free), held, ids)
        found.append(ClusterSnapshot(state, tuple(PlanJob(name=name, gpus=1) for name in names)))
    live, real = found
    decision = Decision(Status.of(live, 0, 0), BottleneckBandwidth(cluster), {})
    for parts in sync().changes(live, real):
        decision.make(msgspec.convert(msgspec.to_builtins({"id": "x", **parts}), Change))
    after = decision.status.snapshot()
    assert {job.name for job in after.jobs} == {job.name for job in real.jobs}
    assert sync().changes(after, real) == []


def test_kubernetes_is_followed(client: Client, url: str, tmp_path: Path) -> None:
    """The example creates the cluster from the API server's objects and follows them."""
    pods = [pod("a-0", 8), pod("b-0", 4)]
    pods[0]["spec"]["nodeName"] = "n0"
    lists = {"/api/v1/nodes": [node(f"n{i}", f"r{i // 2}") for i in range(4)], "/api/v1/pods": pods}

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode({"items": lists[self.path]}))

        def log_message(self, *_: Any) -> None: ...

    CLUSTER.write(tmp_path / "cluster.json")
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["kubernetes", "--url", url, "--cluster", "followed", "--create", "cluster.json"]
        env = os.environ | {"OPTSCHED_TOKEN": TOKEN,
                            "KUBERNETES_API": f"http://127.0.0.1:{server.server_port}"}  # fmt: skip
        command = [sys.executable, EXAMPLES / "sync_cluster.py", *words]
        subprocess.run(command, check=True, cwd=tmp_path, env=env)
        assert client.read("followed")["free"] == 24
        pods[0]["status"]["phase"], pods[1]["spec"]["nodeName"] = "Succeeded", "n3"
        subprocess.run(command, check=True, cwd=tmp_path, env=env)
        server.shutdown()
    found = client.read("followed")
    assert found["free"] == 28 and "n3:0-3" in str(found["snapshot"]["state"])
    body = {"Pod": pod("c-0", 8, 2), "NodeNames": [f"n{i}" for i in range(4)]}
    names, scores = (
        httpx.post(f"{url}/v1/clusters/followed/kubernetes/{verb}", json=body,
                   auth=("kube-scheduler", TOKEN)).json() for verb in ("filter", "prioritize")
    )  # fmt: skip
    assert names["NodeNames"] == ["n0"] and "requested 8" in names["FailedNodes"]["n3"]
    assert [row["Score"] for row in scores] == [10, 0, 0, 0]


def documents(name: str) -> list[dict[str, Any]]:
    """The manifests of a file."""
    return [*yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())]


def parsed(words: list[str]) -> dict[str, Any]:
    """Options of ``optsched serve`` or another command, which is not run."""
    group: Any = typer.main.get_command(commands)
    command = group.get_command(typer.Context(group), words[0])
    found: dict[str, Any] = command.make_context(words[0], [*words[1:]]).params
    return found


def test_manifests(tmp_path: Path) -> None:
    """Ports, paths, options, mounts and annotations are those of the service."""
    (config,) = documents("scheduler.yaml")
    (extender,) = config["extenders"]
    address = urlsplit(extender["urlPrefix"])
    assert (address.port, address.password) == (Settings().port, "TOKEN")
    paths = create_app(Settings(workers=1), Live(tmp_path)).openapi()["paths"]
    path = address.path.replace("/main/", "/{name}/")
    assert {f"{path}/{extender[key]}" for key in ("filterVerb", "prioritizeVerb")} <= paths.keys()
    found = {one["kind"]: one for one in documents("optsched.yaml")}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    service, update, scheduler = spec["containers"]
    options = parsed(["serve", *service["args"]])
    assert options["workers"] == 2  # its memory has a limit, hosts may have many processors
    assert options["port"] == service["ports"][0]["containerPort"] == Settings().port
    assert found["Service"]["spec"]["ports"][0]["port"] == Settings().port
    probes = (service[key]["httpGet"] for key in ("readinessProbe", "livenessProbe"))
    assert all(probe["path"] in paths for probe in probes)
    mounts = {one["mountPath"] for one in service["volumeMounts"]}
    assert {str(options["token_file"].parent), str(options["state"])} == mounts
    volumes = {one["name"] for one in spec["volumes"]}
    assert volumes == {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
    words = sync().arguments(update["command"][2:])
    assert Path(update["command"][1]).parent == Path(words.create).parent
    assert scheduler["command"][1].endswith("/scheduler.yaml")
    (job,) = documents("job.yaml")
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        PODS[0]: str(job["spec"]["completions"]),
        LEVEL: "rack",
    }
    assert template["spec"]["schedulerName"] == config["profiles"][0]["schedulerName"]
    assert {one["role"] for one in documents("kind.yaml")[0]["nodes"]} == {
        "control-plane",
        "worker",
    }


def test_container_file() -> None:
    """Every path that is copied exists and is not ignored; every command has these options."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().split() if line[0] == "!"}
    copied = [shlex.split(line)[1:-1] for line in text.splitlines()
              if line.startswith("COPY") and "--from" not in line]  # fmt: skip
    assert {one for row in copied for one in row} == kept
    assert all((ROOT / one).exists() for one in kept)
    lists = {key: msgspec.json.decode(re.findall(rf"^{key} (\[.*\])$", text, re.M)[0])
             for key in ("ENTRYPOINT", "CMD")}  # fmt: skip
    options = parsed([*lists["ENTRYPOINT"], *lists["CMD"]][1:])
    assert options["port"] == int(re.findall(r"^EXPOSE (\d+)$", text, re.M)[0])
    assert str(options["state"]) == re.findall(r"^VOLUME (\S+)$", text, re.M)[0]
    warmup = re.findall(r"RUN optsched (warmup .*)$", text, re.M)[0]
    cache = re.findall(r"NUMBA_CACHE_DIR=(\S+)", text)[0]
    assert str(parsed(shlex.split(warmup))["cache_dir"]) == cache
    assert "USER 10001" in text and f":{options['port']}/v1/health" in text
    check = msgspec.json.decode(re.findall(r"CMD (\[.*?\])", text)[0])
    compile(check[2], "HEALTHCHECK", "exec")
