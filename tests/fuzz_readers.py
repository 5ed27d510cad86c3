"""Damaged files of every kind that optsched reads: read, or refused in one sentence.

``make fuzz`` runs it, `test_fuzz_readers` a small part of it. JSON is changed by structure (members
dropped, doubled, swapped, replaced by hostile values, numbers moved by one), other files by lines,
cells and characters. A failure names what repeats it.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import optsched
from optsched import JobArray, serving
from optsched.arraypipe.profile import Profile
from optsched.bandwidth import Cluster, ClusterState, HostType, MeasurementTable
from optsched.bandwidth.models.model_document import read_model
from optsched.bench.instances import read_bounds
from optsched.cluster import Nodes, PackingTable, read_trace
from optsched.cluster.determined import document as determined
from optsched.cluster.world.start import read_start
from optsched.elastic import read_jobs
from optsched.errors import OptschedError
from optsched.formats import (
    host_domains,
    nccl_tests,
    nvidia_topo,
    pipelining_csv,
    slurm_topology,
    taillard,
)
from optsched.formats.job_logs import import_trace
from optsched.formats.read_problem import read_problem
from optsched.io.strict_json import read_json
from optsched.plan import ClusterSnapshot, from_kubernetes, from_slurm
from optsched.problems.jobshop import generator
from optsched.service.journal import Journal
from optsched.serving.workload import read_arrivals

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
INSTANCES = ROOT / "instances"
SECONDS = 10.0
"""Processor time after which reading a file of a few kilobytes is a fault."""

HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**64, 10**400, 0.5, -0.0, 1e300, 5e-324, float("nan"),
    float("inf"), "", "0", "1e5", "x" * 5000, "\0", "a\nb", "<b>", "\u2028", "\ud800", "../x", [],
    [[]], [None], {}, {"": 1}, {"format": "optsched.schedule/1"},
]  # fmt: skip
PIECES = [
    *"0123456789,;:=[]-\\#\"'\n\r\t\0\x1b+.{}|/ ", "NV", "GPU1", "\u0661", "\u2028", "9" * 30,
    "1e999", "nan", "-1",
    "0x1", "\ufeff", "\r\n", "\ud800", '""', "n[0-99999999]", "1-1000000000000",
]  # fmt: skip

PAIR = Cluster.uniform(HostType("h", 2, (("X", "NV4"), ("NV4", "X"))), 2, name="c")
ARRAY = JobArray([[2, 3]], [[4, 5]], micro_batches=2)
SLURM_NODES = "".join(
    f"NodeName={name} Gres=gpu:2(S:0) GresUsed=gpu:{used}(IDX:{ids}) "
    "State=MIXED CfgTRES=gres/gpu=2\n"
    for name, used, ids in (("n01", 1, "0"), ("n02", 0, "N/A"))
)
SQUEUE = {
    "jobs": [
        {"job_id": 1, "job_state": ["RUNNING"], "nodes": "n01", "gres_detail": ["gpu:1(IDX:0)"],
         "account": "x", "priority": {"set": True, "infinite": False, "number": 5},
         "start_time": {"set": True, "infinite": False, "number": 900}, "time_limit": 10},
        {"job_id": 2, "job_state": ["PENDING"], "account": "y", "node_count": 2, "priority": 9,
         "tres_req_str": "gres/gpu:h=2", "time_limit": 5, "submit_time": 950},
    ]
}  # fmt: skip


def pod(name: str, node: str | None, gpus: str) -> dict[str, Any]:
    """A pod as ``kubectl get pods -o json`` lists it."""
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    spec = {"containers": [limits], **({"nodeName": node} if node else {})}
    phase = {"phase": "Running" if node else "Pending"}
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "ml"}, "spec": spec,
            "status": phase}  # fmt: skip


def node(name: str) -> dict[str, Any]:
    """A node as ``kubectl get nodes -o json`` lists it."""
    labels = {"nvidia.com/gpu.product": "H100", "zone": "1"}
    amounts = {"nvidia.com/gpu": "2"}
    return {"kind": "Node", "metadata": {"name": name, "labels": labels},
            "status": {"capacity": amounts, "allocatable": amounts}}  # fmt: skip


class Kind(NamedTuple):
    """A kind of file: examples of it, and the function that reads it."""

    examples: list[str]
    read: Callable[[Path], Any]
    again: Callable[[Any], bytes | str] | None = None
    """Text of what was read, if it can be written: it is read again without an error."""


def texts(*patterns: str) -> list[str]:
    """Contents of files of `instances`."""
    return [path.read_text() for one in patterns for path in sorted(INSTANCES.glob(one))]


def tree(read: Callable[[Any, str], Any]) -> Callable[[Path], Any]:
    """Reader of a file of JSON by one of parsed JSON."""
    return lambda path: read_json(path, read)


def text(read: Callable[[str], Any]) -> Callable[[Path], Any]:
    """Reader of a file by one of its text."""
    return lambda path: read(path.read_bytes().decode(errors="surrogateescape"))


def kinds() -> dict[str, Kind]:
    """Return all kinds of files by name."""
    array = JobArray([[1, 2], [3, 1]], [[2, 4], [6, 2]], activation=4, memory=20)
    solved = optsched.solve(array, "dispatch").schedule
    scenario = serving.reference(rate=400, burst=1, seconds=0.02, seed=1)
    log = serving.simulate(scenario).log
    plan = serving.plan_instances(scenario, rate=100)
    state = ClusterState.idle(PAIR).take((0, 3), "a", 5)
    snapshot = from_slurm(PAIR, SLURM_NODES, SQUEUE, now=1000)
    (placement,) = texts("subset/mixed-4x8-2*")
    placement = placement.replace('"mixed.model', f'"{INSTANCES}/subset/mixed.model')
    graph = lambda problem: problem.graph()  # noqa: E731
    shops = {
        "job shop": texts("jobshop/tiny-*.json"),
        "job array": [written(array)],
        "schedule": [written(solved)],
        "quota plan": texts("quota/single-12*", "quota/two-types-makespan*"),
        "GPU placement": [placement],
        "standard": texts("jobshop/ft06.txt"),
        "Taillard": [taillard.to_text(generator.generate(3, 3, 5, 6))],
        "job_shop_lib": ['{"name": "x", "duration_matrix": [[1, 2], [3, 4]], "machines_matrix": '
                         '[[0, 1], [1, 0]], "metadata": {"optimum": 3}}'],
        "arraypipe": ['{"name": "x", "n_stages": 2, "n_jobs": 1, "flags": ["a"], "jobs": '
                      '[{"route": [0, 1, 1, 0], "dur": [1, 2, 3, 4]}]}'],
        "job table": ["job,stage,kind,duration_ms,bytes\na,0,F,1.5,9\na,1,F,1,9\na,0,B,2,\n"
                      "a,1,B,2,\n",
                      "job,machine,duration,release\n7,saw,3,2\n8,mill,4,\n7,mill,2,2\n"],
    }  # fmt: skip
    logs = {
        "sacct": "JobID|Account|Partition|State|Submit|Start|End|Elapsed|ReqTRES|AllocTRES\n"
        "5|vc|gpu|COMPLETED|2020-06-09T18:00:00|2020-06-09T18:00:05|2020-06-09T19:00:05|01:00:00|"
        "cpu=1,gres/gpu=2|cpu=1,gres/gpu=2\n",
        "swf": "; Version: 2.2\n; MaxProcs: 128\n1 0 5 60 4 -1 -1 4 3600 -1 1 7 1 -1 2 -1 -1 -1\n",
        "helios": "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,"
        "duration,queue\n1,u,vc,2,6,1,COMPLETED,2020-06-09 18:00:00,2020-06-09 18:00:05,"
        "2020-06-09 18:01:05,60,5\n",
        "philly": '[{"status": "Pass", "vc": "v", "jobid": "j1", "submitted_time": '
        '"2020-06-09 18:00:00", "user": "u", "attempts": [{"start_time": "2020-06-09 18:00:05", '
        '"end_time": "2020-06-09 18:01:05", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]}]',
        "csv": (INSTANCES / "trace" / "bursts-60.csv").read_text()[:600].rsplit("\n", 1)[0],
    }
    found = {name: Kind(some, read_problem, graph) for name, some in shops.items()}
    found |= {
        f"log of {name}": Kind([one], lambda path: import_trace(path, path.with_name("trace.csv")))
        for name, one in logs.items()
    }
    found |= {
        "pipelining CSV": Kind(["0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"],
                               lambda path: pipelining_csv.read(path, ARRAY)),
        "trace": Kind([logs["csv"]], lambda path: read_trace(path, Nodes(2, gpus=8))),
        "start": Kind(["job_id,start_s,nodes,end_s,restart_s,work_s\na,0,n0:4|n1:4,60,5,1.5\n"
                       "b,3,n0:1,,,\n"],
                      lambda path: read_start(path, Nodes(2, gpus=8), 100)),
        "packing table": Kind(["type_a,type_b,speed_a,speed_b\na,b,.5,.6\na,a,.4,.4\n"],
                              PackingTable.read),
        "decide": Kind(texts("determined/*.json"), tree(determined.from_tree)),
        "elastic jobs": Kind([(ROOT / "optsched/elastic/demo.toml").read_text()], read_jobs),
        "known bounds": Kind(["instance,lb,ub\nft06,55,55\nft10,930,930\n"], read_bounds),
        "profile": Kind(texts("profiles/*.json"), Profile.read, written),
        "scenario": Kind([written(scenario)], serving.Scenario.read, written),
        "serving log": Kind([log.to_json().decode()],
                            lambda path: serving.Log.read(path, scenario)),
        "serving plan": Kind([written(plan, scenario)],
                             lambda path: serving.Plan.read(path, scenario)),
        "arrivals": Kind(["arrival_ms\n0\n1.5\n1.5\n20\n"], read_arrivals),
        "cluster": Kind([PAIR_JSON], Cluster.read, written),
        "state": Kind([written(state)], lambda path: ClusterState.read(path, PAIR), written),
        "bandwidth model": Kind(texts("subset/mixed.model.json"), read_model),
        "measurements": Kind(['op,payload_bytes,hosts,pattern,gpus,busbw_GBps\n'
                              'reduce,8,2,2+1,"a:0,1 b:3",4.5\n'], MeasurementTable.read),
        "nccl-tests": Kind([NCCL], nccl_tests.read_logs),
        "host map": Kind(["n01 a\nn02 b\n", "from,to\nn01,a\n"], nccl_tests.read_host_map),
        "nvidia-smi topo": Kind([TOPO], text(lambda one: nvidia_topo.from_text(one, "h"))),
        "rocm-smi": Kind([ROCM], text(lambda one: nvidia_topo.from_text(one, "h", nics=1))),
        "topology.conf": Kind(["SwitchName=s0 Nodes=n[08-10] # a\nSwitchName=s1 \\\n Switches=s0\n",
                               "BlockName=b0 Nodes=n[1-2]\nBlockName=b1 Nodes=n3,n4\n"
                               "BlockSizes=2,4\n"],
                              text(slurm_topology.from_slurm)),
        "topology.yaml": Kind(["- topology: a\n  cluster_default: true\n  tree:\n    switches:\n"
                               "    - {switch: s0, nodes: 'n[08-10]'}\n"
                               "    - {switch: t, children: s0}\n"],
                              text(slurm_topology.from_slurm)),
        "labels": Kind(['host,zone,rack\nn[1-2],z1,"r1"\nn3,z1,r2\n'], 
                       text(host_domains.from_labels)),
        "kubectl nodes": Kind([json.dumps({"items": [node("a"), node("b")]})],
                              tree(lambda one, at: host_domains.from_nodes(one, at, ["zone"]))),
        "kubectl pods": Kind([json.dumps({"items": [node("n01"), node("n02"), pod("p", "n01", "1"),
                                                    pod("q", None, "2")]})],
                             text(lambda one: from_kubernetes(PAIR, one))),
        "scontrol": Kind([SLURM_NODES], text(lambda one: from_slurm(PAIR, one, SQUEUE, now=1000))),
        "squeue": Kind([json.dumps(SQUEUE)],
                       text(lambda one: from_slurm(PAIR, SLURM_NODES, one, now=1000))),
        "snapshot": Kind([written(snapshot)], ClusterSnapshot.read, written),
        "journal": Kind([journal()], read_journal),
    }  # fmt: skip
    return found


def written(value: Any, *rest: Any) -> str:
    """Text of what a value writes."""
    with tempfile.TemporaryDirectory() as folder:
        value.write(Path(folder) / "x", *rest)
        return (Path(folder) / "x").read_text()


def journal() -> str:
    """A journal of two changes."""
    with tempfile.TemporaryDirectory() as folder:
        one = Journal.create(Path(folder) / "x", b'{"format": "a"}')
        one.append(b'{"n": 1}')
        one.close()
        return (Path(folder) / "x").read_text()


def read_journal(path: Path) -> list[bytes]:
    """Contents of a journal."""
    one, contents = Journal.open(path)
    one.close()
    return contents


PAIR_JSON = written(PAIR)
NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8
#  Rank  0 Group  0 Pid 10 on    n01 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid 11 on    n02 device  0 [0000:07:00] NVIDIA H100
#  size   count  type  redop  root   time   algbw  busbw #wrong  time  algbw  busbw #wrong
   4096    1024  float   sum    -1  12.30   10.00  10.00      0  12.3  10.00  10.00    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.0
"""
TOPO = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-3\nGPU1\tNV4\t X \tPIX\t4-7\n"
    "NIC0\tPIX\tPIX\t X \t\n\nLegend:\n"
)
ROCM = (
    "== Weight ==\n GPU0 GPU1\nGPU0 0 15\nGPU1 15 0\n== Hops ==\n GPU0 GPU1\nGPU0 0 1\nGPU1 1 0\n"
    "== Link Type between two GPUs ==\n GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n== Numa Nodes ==\n"
    "GPU[0] : (Topology) Numa Node: 0\nGPU[1] : (Topology) Numa Node: 1\n"
)


def damaged(text: str, random: Random) -> str:
    """Return the text after one to four changes."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict | list) and random.random() < 0.85:
            text = json.dumps(changed(parsed, random), ensure_ascii=random.random() < 0.5)
        else:
            text = spoiled(text, random)
    return text


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            found += [(node, key) for key in keys]
            left += [node[key] for key in keys]
    return found


def changed(tree: Any, random: Random) -> Any:
    """Return a copy of parsed JSON with one change of its structure or of a value."""
    tree = copy.deepcopy(tree)
    at = places(tree)
    if not at:
        return random.choice(HOSTILE)
    (node, key), (other, there) = random.choice(at), random.choice(at)
    match random.randrange(7):
        case 0:
            del node[key]
        case 1 | 2:
            node[key] = copy.deepcopy(random.choice(HOSTILE))
        case 3 if isinstance(node[key], int | float):
            node[key] += random.choice((-1, 1, 0.5, 10**6))
        case 4:
            node[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(node[key])
        case 5 if isinstance(node, dict):
            node[random.choice((str(key) + "s", "", "format", "name"))] = node.pop(key)
        case _ if isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        case _:
            node[key] = [node[key]]
    return tree


def spoiled(text: str, random: Random) -> str:
    """Return a text with a line, a cell or some characters lost, doubled, moved or replaced."""
    lines = text.split("\n")
    row, start = random.randrange(len(lines)), random.randrange(len(text) + 1)
    end = min(len(text), start + random.randrange(30))
    match random.randrange(7):
        case 0:
            del lines[row]
        case 1:
            lines.insert(random.randrange(len(lines)), lines[row])
        case 2:
            comma = "," if "," in lines[row] else "|" if "|" in lines[row] else " "
            cells = lines[row].split(comma)
            cells[random.randrange(len(cells))] = str(random.choice(HOSTILE))[:60]
            lines[row] = comma.join(cells)
        case 3:
            return text[:start]
        case 4:
            return text[:start] + text[end:]
        case 5:
            return text[:start] + text[start:end] * 2 + text[end:]
        case _:
            return text[:start] + random.choice(PIECES) + text[end:]
    return "\n".join(lines)


def fault(kind: Kind, content: str, path: Path) -> str:
    """What is wrong with how a file is read; empty if nothing is."""
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = kind.read(path)
    except OptschedError as error:
        if not str(error).strip() or "\n" in str(error):
            return f"not one sentence: {str(error)!r:.300}"
        value = None
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"[:300]
    if (spent := time.process_time() - began) > SECONDS:
        return f"took {spent:.1f} s of processor time"
    if value is None or kind.again is None:
        return ""
    try:
        again = kind.again(value)
        if isinstance(again, bytes | str):
            path.write_bytes(again.encode() if isinstance(again, str) else again)
            kind.read(path)
    except OptschedError as error:
        return f"what was read is refused when written: {error}"[:300]
    except Exception as error:
        return f"what was read raised {type(error).__name__}: {error}"[:300]
    return ""


def content(kind: Kind, name: str, seed: int) -> str:
    """The damaged file of a kind and a seed."""
    random = Random(f"{name} {seed}")
    return damaged(random.choice(kind.examples), random)


def main() -> int:
    """Read damaged files for so many seconds; 1 if any was neither read nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    parser.add_argument("--kind", help="only this one")
    parser.add_argument("--count", type=int, help="files of every kind, instead of the seconds")
    given = parser.parse_args()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30,) * 2)  # an answer, not a full machine
    chosen = {name: kind for name, kind in kinds().items() if given.kind in (None, name)}
    found, end = Counter[str](), time.monotonic() + given.seconds
    total, seed = 0, given.seed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        while seed < given.seed + given.count if given.count else time.monotonic() < end:
            for name, kind in chosen.items():
                total += 1
                if wrong := fault(kind, content(kind, name, seed), path):
                    if (key := f"{name}: {wrong[:60]}") not in found:
                        print(f"{name}: {wrong}", flush=True)
                        again = f'--kind "{name}" --seed {seed} --count 1'
                        print(f"  python tests/fuzz_readers.py {again}", flush=True)
                    found[key] += 1
            seed += 1
    print(f"{total} damaged files of {len(chosen)} kinds, {found.total()} faults")
    return min(found.total(), 1)


if __name__ == "__main__":
    sys.exit(main())
