"""The HTTP service: answers, refusals, limits, workers; most of it in this process."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from starlette.testclient import TestClient

from benchmarks.service.hostile import bodies, fault
from optsched import InputError
from optsched.service.answers import MAX_DEPTH, Reply, answer
from optsched.service.app import create_app
from optsched.service.queries import PATHS, QUERIES
from optsched.service.routes import Route
from optsched.service.schemas import DOCUMENTS, bundle
from optsched.service.settings import Settings, is_loopback, read_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

TOKEN = "0123456789abcdefghij"


def slept(seconds: float) -> Reply:
    """Called in a worker."""
    time.sleep(seconds)
    return Reply(200, b"{}")


def died() -> Reply:
    """Called in a worker."""
    import os

    os._exit(3)


async def sleep(request: Request, _: bytes) -> Reply:
    """Occupy a worker."""
    workers, seconds = request.app.state.workers, float(request.path_params["seconds"])
    found: Reply = await workers.run(request.receive, slept, seconds)
    return found


async def die(request: Request, _: bytes) -> Reply:
    """End a worker."""
    found: Reply = await request.app.state.workers.run(request.receive, died)
    return found


async def bug(request: Request, _: bytes) -> Reply:
    """Raise what is not raised on purpose."""
    raise ZeroDivisionError


MORE = [
    Route("POST", "/v1/test/sleep/{seconds}", "", None, dict, sleep),
    Route("POST", "/v1/test/die", "", None, dict, die),
    Route("GET", "/v1/test/bug", "", None, dict, bug),
]


@pytest.fixture(scope="module")
def running() -> Iterator[TestClient]:
    """A service with one worker, and endpoints that misuse it."""
    settings = Settings(workers=1, queue=1, timeout=20, quick_body=2000, max_body=100_000)
    with TestClient(create_app(settings, more=MORE), base_url="http://localhost") as found:
        yield found


def client(**settings: Any) -> TestClient:
    """A service without workers."""
    return TestClient(create_app(Settings(**settings)), base_url="http://localhost")


def metric(found: Any, name: str) -> float:
    """The value of a line of /v1/metrics."""
    lines = found.get("/v1/metrics").text.splitlines()
    return next((float(one.split()[-1]) for one in lines if one.startswith(f"{name} ")), 0.0)


def until(condition: Any) -> None:
    """Poll a condition."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def answered(found: TestClient, path: str, body: Any) -> Any:
    """Send a request until there is a worker for it, as refusals by 503 say."""
    for _ in range(30):
        if (sent := found.post(path, json=body)).status_code != 503:
            return sent
    raise AssertionError(sent.text)


def refused(found: Any, status: int, field: str) -> dict[str, Any]:
    """Check a refusal and return it."""
    assert found.status_code == status, found.text
    error: dict[str, Any] = found.json()["error"]
    assert set(error) == {"field", "value", "message"} and error["field"] == field, error
    return error


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_answers_its_example(name: str, running: TestClient) -> None:
    """In the event loop or in a worker, with the id of the body, as the OpenAPI page describes."""
    body = QUERIES[name].example | {"id": "r1"}
    found = running.post(PATHS[name], json=body)
    assert found.status_code == 200, found.text
    assert found.json()["id"] == "r1"
    same = json.loads(answer(name, json.dumps(body).encode(), 10).content)
    assert {**found.json(), "seconds": 0, "schedule": 0} == {**same, "seconds": 0, "schedule": 0}
    described = running.get("/v1/openapi.json").json()["paths"][PATHS[name]]["post"]
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    jsonschema_rs.validator_for(bundle(schema.rpartition("/")[2])).validate(found.json())


def test_large_bodies_go_to_a_worker(running: TestClient) -> None:
    """The answer is the same."""
    body, kind = json.dumps(QUERIES["choose"].example), {"content-type": "application/json"}
    sent = [running.post("/v1/choose", content=body + " " * n, headers=kind) for n in (0, 3000)]
    assert sent[0].json() == sent[1].json() and sent[0].status_code == 200


def test_bugs_are_server_errors_in_the_same_form(caplog: pytest.LogCaptureFixture) -> None:
    """With the traceback in the log, not in the answer."""
    app = create_app(Settings(), more=MORE)
    found = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    error = refused(found.get("/v1/test/bug"), 500, "service")
    assert "ZeroDivisionError" in error["message"] and "Traceback" not in error["message"]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "field", "value"),
    [
        ("choose", {"gpus": -1}, "gpus", -1),
        ("choose", {"gpus": True}, "gpus", True),
        ("choose", {"gpu": 4}, "body", "gpu"),
        ("choose", {"cluster": None}, "cluster", None),
        ("choose", {"policy": {"required": 3}}, "policy.required", 3),
        ("choose", {"deadline": 0}, "deadline", 0),
        ("solve", {"time_limit": 11}, "time_limit", 11),
        ("solve", {"solver": "nosuch"}, "solver", "nosuch"),
        ("solve", {"problem": {"format": "optsched.subset/1", "model": {"file": "/etc/passwd"}}},
         "problem.model", "the name of a file"),
        ("choose", {"model": {}}, "cluster",
         '{"format":"optsched.cluster/1","types":[{"name":"H100-SXM...'),
        ("choose", {"cluster": None, "model": None}, "cluster", None),
        ("plan", {"snapshot": QUERIES["plan"].example["snapshot"] | {
            "jobs": [{"name": "a", "gpus": 4}]}},
         "snapshot.jobs['a'].gpus", 4),
        ("choose", {"gpus": 9}, "gpus", 9),
        ("clear", {"snapshot": {"format": "optsched.snapshot/1"}}, "snapshot", None),
        ("choose", {"gpus": 4, "policy": {"max_hosts": 1}}, "policy.max_hosts", 1),
        ("gang", {"jobs": {"c": 9}}, "jobs", '{"c":9}'),
        ("gang", {"jobs": {}}, "jobs", "{}"),
        ("choose", {"best": -1}, "best", -1),
        ("choose", {"policy": {"required": "nosuch"}}, "policy.required", "nosuch"),
        ("clear", {"snapshot": QUERIES["clear"].example["snapshot"] | {
            "jobs": [{"name": "c", "gpus": 4, "level": "host"}]}}, "request", "c"),
        ("plan", {"policy": "os:system"}, "policy", "os:system"),
        ("plan", {"policy": "os:system:a=1"}, "policy", "os:system:a=1"),
        ("clear", {"request": "nosuch"}, "request", "nosuch"),
        ("clear", {"request": "x" * 99}, "request", "x" * 57 + "..."),
        ("verify", {"objective": "makespan"}, "objective", "makespan"),
    ],
)  # fmt: skip
def test_refusals_name_field_and_value(
    name: str, change: dict[str, Any], field: str, value: Any
) -> None:
    """Of wrong bodies, and of a correct one that the cluster cannot satisfy."""
    found = answer(name, json.dumps(QUERIES[name].example | change).encode(), 10)
    error = json.loads(found.content)["error"]
    conflict = repr(value) in ("9", "1", "'{\"c\":9}'", "'c'")
    assert found.status == (409 if conflict else 400) and error["field"] == field, error
    assert error["value"] == value


def test_a_trailing_slash_is_another_path(running: TestClient) -> None:
    """Not found, and no redirection, which clients would follow without the body."""
    found = running.post(PATHS["choose"] + "/", json={}, follow_redirects=False)
    assert refused(found, 404, "path")["value"] == "/v1/choose/"


def test_hostile_bodies_are_refused_with_a_way_out() -> None:
    """A few hundred; benchmarks/service/hostile.py sends many more."""
    seed = random.randrange(10**6)
    for _, (name, body) in zip(range(300), bodies(seed), strict=False):
        found = answer(name, body, 2.0)
        assert not fault(found.status, found.content), (seed, name, body, found)


def test_depth_is_limited_outside_of_strings() -> None:
    """Brackets in strings do not count."""
    deep = QUERIES["solve"].example | {"options": {"x": json.loads("[" * 62 + "]" * 62)}}
    flat = QUERIES["choose"].example | {"id": '[{"\\' * 40}
    assert b"nested too deeply" not in answer("solve", json.dumps(deep).encode(), 1).content
    deep["options"]["x"] = [deep["options"]["x"]] * 2
    found = answer("solve", json.dumps(deep).encode(), 1)
    assert found.status == 400 and f"at most {MAX_DEPTH}".encode() in found.content
    assert answer("choose", json.dumps(flat).encode(), 1).status == 200


def test_gate_refuses_before_an_endpoint_runs() -> None:
    """Paths, methods, types, sizes, hosts, tokens."""
    found = client(max_body=2000)
    body = QUERIES["choose"].example
    refused(found.get("/v1/nosuch"), 404, "path")
    assert "POST" in refused(found.get("/v1/choose"), 405, "method")["message"]
    refused(found.post("/v1/choose", data={"gpus": "4"}), 415, "content-type")
    refused(found.post("/v1/choose", json=body | {"x": "a" * 2000}), 413, "body")
    chunks = (b"a" * 1000 for _ in range(3))
    kind = {"content-type": "application/json"}
    refused(found.post("/v1/choose", content=chunks, headers=kind), 413, "body")
    refused(found.get("/v1/health", headers={"host": "evil.example:80"}), 403, "host")
    refused(found.get("/v1/health", headers=[("x", "a" * 5000)] * 20), 413, "headers")
    refused(found.get("/v1/schemas/nosuch"), 400, "name")
    for host in ("LocalHost:1", "127.0.0.1", "[::1]:8765", "[::1]"):
        assert found.get("/v1/health", headers={"host": host}).status_code == 200


def test_token_is_required_and_never_shown() -> None:
    """Only the state of the service is open."""
    found = client(token=TOKEN)
    assert found.get("/v1/health").status_code == 200
    for given_token in ("", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
        headers = {"authorization": given_token.encode()}
        for path in ("/v1/metrics", "/v1/openapi.json", "/docs", "/v1/schemas/state"):
            refused(found.get(path, headers=headers), 401, "authorization")
        refused(found.post("/v1/decide", json={}, headers=headers), 401, "authorization")
    headers = {"authorization": f"Bearer {TOKEN}", "host": "gpu-master:8765"}
    sent = found.post("/v1/decide", json=QUERIES["decide"].example, headers=headers)
    assert sent.status_code == 200
    assert TOKEN not in repr(Settings(token=TOKEN))


def test_settings_refuse_unsafe_and_wrong_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts than the loopback interface need a token; a message never has it."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "gpu-master", "127.0.0.1.evil"):
        assert not is_loopback(host)
        with pytest.raises(InputError, match="give a token"):
            Settings(host=host)
        Settings(host=host, token=TOKEN)
    for wrong in ("short", "a b" * 10, "x" * 2000, "é" * 20):
        with pytest.raises(InputError, match="token: expected") as error:
            Settings(token=wrong)
        assert wrong not in str(error.value)
    for field, value in (("port", 70_000), ("workers", 0), ("timeout", float("nan")),
                         ("max_body", True), ("in_flight", 0), ("queue", -1)):  # fmt: skip
        with pytest.raises(InputError, match=field):
            Settings(**{field: value})
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    monkeypatch.setenv("OPTSCHED_TOKEN", TOKEN)
    assert read_token(None) == TOKEN


def test_dead_workers_are_replaced(running: TestClient) -> None:
    """The request of a dead one gets a 503, the next one an answer."""
    found = running.post("/v1/test/die", json={})
    refused(found, 503, "workers")
    assert found.headers["retry-after"]
    assert answered(running, "/v1/clear", QUERIES["clear"].example).status_code == 200
    assert metric(running, 'optsched_workers_lost_total{why="died"}') == 1


def test_long_requests_queue(running: TestClient) -> None:
    """One runs, one queues, others are refused; small decisions do not queue."""
    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(running.post, "/v1/test/sleep/4", json={})]
        until(lambda: metric(running, "optsched_workers_busy") == 1)
        sent.append(threads.submit(running.post, "/v1/test/sleep/0", json={}))
        until(lambda: metric(running, "optsched_queue") == 1)
        refused(running.post("/v1/test/sleep/0", json={}), 503, "workers")
        assert running.post("/v1/choose", json=QUERIES["choose"].example).status_code == 200
        assert [one.result().status_code for one in sent] == [200, 200]


def test_work_beyond_the_limit_is_stopped(
    running: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is replaced."""
    state = running.app.state  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(state.workers, "_settings", replace(state.settings, timeout=0.1))
        refused(running.post("/v1/test/sleep/30", json={}), 422, "body")
    assert answered(running, "/v1/test/sleep/0", {}).status_code == 200
    assert metric(running, 'optsched_workers_lost_total{why="timeout"}') == 1


def test_schemas_are_complete_and_accept_the_examples() -> None:
    """The OpenAPI page refers only to schemas that it has, and describes every endpoint."""
    page = client().get("/v1/openapi.json").json()
    known, text = page["components"]["schemas"], json.dumps(page)
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in known
    for path in PATHS.values():
        described = page["paths"][path]["post"]
        content = described["requestBody"]["content"]["application/json"]
        schema = bundle(content["schema"]["$ref"].rpartition("/")[2])
        assert jsonschema_rs.is_valid(schema, content["example"])
        assert not jsonschema_rs.is_valid(schema, [])
        assert {"200", "400", "409", "413", "503"} <= described["responses"].keys()
    for name in DOCUMENTS:
        assert client().get(f"/v1/schemas/{name}").json() == bundle(name)
    folder = Path(__file__).parents[2] / "instances"
    for path in (*folder.glob("*/*-2.*.json"), *folder.glob("determined/*.json")):
        document = json.loads(path.read_text())
        if (name := document["format"].split(".")[1].partition("/")[0]) in DOCUMENTS:
            assert jsonschema_rs.is_valid(bundle(name), document), path
