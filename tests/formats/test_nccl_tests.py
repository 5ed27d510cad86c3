"""Logs of nccl-tests: what is read from which version, and what is refused where."""

from __future__ import annotations

import random
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.models.collectives import bus_factor
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.errors import InputError
from optsched.formats.nccl_tests import read_host_map, read_logs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIB = 1 << 20


def log(
    ranks: Sequence[tuple[str, int]],
    rows: Sequence[tuple[int, float]],
    *,
    program: str = "all_reduce_perf",
    op: str = "all_reduce",
    new: bool = True,
    per_process: int = 1,
    wrong: str = "0",
    bounds: str = "0 OK",
    said: bool = True,
) -> str:
    """A log as the program writes it: rows of (bytes, bus bandwidth out of place)."""
    factor = bus_factor(FACTORS.get(op, op), len(ranks))
    lines = []
    if said and new:
        lines += ["# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807"]
        lines += [f"# Collective test starting: {program}"]
    elif said:
        lines += [f"+ mpirun -np {len(ranks)} ./build/{program} -b 8 -e 2G -f 2"]
    lines += [
        f"# nThread 1 nGpus {per_process} minBytes 8 maxBytes 2147483648 step: 2(factor) "
        "warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
    ]
    for i, (host, device) in enumerate(ranks):
        bus = f"[0000:{device + 7:02x}:00]" if new else f"[0x{device + 7:02x}]"
        group = "Group  0 " if new else ""
        lines.append(
            f"#  Rank {i:2} {group}Pid {4000 + i // per_process:6} on {host:>10} device "
            f"{device:2} {bus} NVIDIA H100 80GB HBM3"
        )
    lines += [
        "host01:4000:4000 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "NCCL version 2.18.3+cuda12.2",
        "#",
        "#                                         out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
        "     (us)  (GB/s)  (GB/s)",
    ]
    redop, root = COLUMNS[op].split()
    for size, busbw in rows:
        lines.append(
            f"{size:12} {size // 4:13}     float {redop:>7} {root:>7}   123.45 "
            f"{busbw / factor:7.2f} {busbw:7.2f} {wrong:>6}   120.11    1.00    1.00    N/A"
        )
    lines += [f"# Out of bounds values : {bounds}", "# Avg bus bandwidth    : 999.123", "#"]
    if new:
        lines.append(f"# Collective test concluded: {program}")
    return "\n".join(lines) + "\n"


COLUMNS = {
    "all_reduce": "sum -1", "reduce_scatter": "sum -1", "all_gather": "none -1",
    "all_to_all": "none -1", "broadcast": "none 0", "reduce": "max 0", "sendrecv": "sum -1",
    "gather": "none 3", "scatter": "none 1",
}  # fmt: skip
"""What programs print as redop and root."""

FACTORS = {"sendrecv": "reduce", "gather": "all_gather", "scatter": "all_gather"}

EIGHT = [("host01", i) for i in range(5)] + [("host02", i) for i in (0, 1, 7)]
ROWS = [(8, 0.0), (16 * MIB, 153.44), (2048 * MIB, 254.61)]


def read(tmp_path: Path, text: str, **rest: Any) -> MeasurementTable:
    """The table of one log."""
    path = tmp_path / "run.log"
    path.write_text(text)
    return read_logs(path, **rest)


TAGS = (
    "", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[prterun-n1-1234@1,0]<stdout>:", "0: ", " 0: ",
    "gpu-node01: ", "n1.lab: ", "[0] ", "[rank0]: ", "[default0]:", "(head, rank=0, pid=1) ",
    "\x1b[36m(head, rank=0, pid=1)\x1b[0m ", "(worker1, rank=1, pid=7, ip=10.0.0.2) ",
    "(RayWorker pid=12, ip=10.1.2.3) ", "[pod/run-launcher-x7k/main] ", "launcher-1  | ", "main | ",
    "2026-11-28T10:00:0%.123456789Z ", "2026-11-28T10:00:0%.123+00:00 stdout F ",
    "2026-11-28 10:00:0%,123 ", "Sat Nov 28 10:00:0% 2026<stdout>:",
    "[pod/a/b] 2026-11-28T10:00:0%Z [1,0]<stdout>:", "run-launcher-x7k main ",
)  # fmt: skip
"""What launchers put before the lines; % stands for a figure that changes."""


@given(st.data())
def test_any_run(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the GPUs, the order of ranks and what else is printed: the same measurement."""
    hosts = data.draw(
        st.lists(st.sampled_from(["a", "b-1", "c.d", "x_9"]), min_size=1, unique=True)
    )
    gpus = {h: data.draw(st.sets(st.integers(0, 15), min_size=2, max_size=8)) for h in hosts}
    ranks = [(h, i) for h in hosts for i in sorted(gpus[h])]
    random.Random(data.draw(st.integers(0, 99))).shuffle(ranks)
    rate = data.draw(st.integers(100, 90_000)) / 100
    text = log(ranks, [(4096, rate)], new=data.draw(st.booleans()))
    tag = data.draw(st.sampled_from(TAGS))
    text = "".join(
        f"{tag.replace('%', str(k % 6))}{line}\n" for k, line in enumerate(text.splitlines())
    )
    if data.draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    table = read(tmp_path_factory.mktemp("log"), text)
    assert table.payload == 4096
    (row,) = table
    assert row.value == round(rate * 1e6)
    assert dict(row.gpus) == {h: tuple(sorted(ids)) for h, ids in gpus.items()}
    assert row.pattern == tuple(sorted(map(len, gpus.values()), reverse=True))


def test_collectives(tmp_path: Path) -> None:
    """Each collective has its factor and its name; `op` counts where the log says nothing."""
    names = {
        "all_gather": "all_gather_perf", "reduce_scatter": "reduce_scatter_perf",
        "all_to_all": "alltoall_perf", "broadcast": "broadcast_perf", "reduce": "reduce_perf",
    }  # fmt: skip
    for op, program in names.items():
        for said in (True, False):
            text = log(EIGHT, ROWS[1:2], program=program, op=op, said=said, new=said)
            assert read(tmp_path, text, op=op).op == op
        with pytest.raises(InputError, match=rf"run\.log:\d+: is a run of {op}, expected all_re"):
            read(tmp_path, log(EIGHT, ROWS[1:2], program=program, op=op))
    # unsaid, but the two bandwidths contradict the collective
    with pytest.raises(InputError, match=r"makes .*: another collective"):
        read(tmp_path, log(EIGHT, ROWS[1:2], op="reduce_scatter", said=False, new=False))
    with pytest.raises(InputError, match="sendrecv_perf is none of the collectives"):
        read(tmp_path, log(EIGHT, ROWS, program="sendrecv_perf"))
    with pytest.raises(InputError, match="op: expected one of"):
        read(tmp_path, "", op="allreduce")


def test_sections(tmp_path: Path) -> None:
    """Of several runs in a log each has its own name, also after one that was interrupted."""
    run = log(EIGHT, ROWS[1:2])
    cut = log(EIGHT, ROWS[1:2], new=False).partition("# Out of bounds")[0]
    other = log(EIGHT, ROWS[1:2], program="all_gather_perf", op="all_gather", new=False)
    with pytest.warns(UserWarning, match="the run is cut off"):
        assert len(read(tmp_path, cut + run, payload=16 * MIB)) == 2
    place = rf"run\.log:{cut.count(chr(10)) + 2}: is a run of all_gather, expected all_reduce"
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(InputError, match=place):
        read(tmp_path, cut + other, payload=16 * MIB)
    late = run.replace("# Collective test starting: all_reduce_perf\n", "")
    assert read(tmp_path, late).op == "all_reduce"
    with pytest.raises(InputError, match=r"names all_gather, the run began as all_reduce"):
        read(tmp_path, run.replace("concluded: all_reduce", "concluded: all_gather"))
    with pytest.raises(InputError, match="my_own_perf is none of the collectives"):
        read(tmp_path, run.replace("starting: all_reduce", "starting: my_own"))


@pytest.mark.parametrize("new", [True, False])
def test_runs_that_wrote_into_each_other(tmp_path: Path, new: bool) -> None:
    """Parts of two runs in any order: refused, or each with its own hosts and values."""
    size, parts = 16 * MIB, {}
    for host, value in (("a", 100.5), ("b", 50.25)):
        text = log([(f"{host}{i % 2}", i // 2) for i in range(4)], [(size, value)], new=new)
        head, row, tail = text.rpartition(f"{size:12} ")
        row, bounds, tail = (row + tail).partition("# Out of bounds")
        parts[host] = [head, row, bounds + tail]
    for at in combinations(range(6), 3):
        left = {host: iter(own) for host, own in parts.items()}
        text = "".join(next(left["a" if i in at else "b"]) for i in range(6))
        if at in ((0, 1, 2), (3, 4, 5)):
            found = read(tmp_path, text, payload=size)
            hosts = {row.value: row.gpus[0][0][0] for row in found}
            assert hosts == {100_500_000: "a", 50_250_000: "b"}
        else:
            with pytest.raises(InputError, match=r"run\.log:"):
                read(tmp_path, text, payload=size)


def test_buses_that_repeat(tmp_path: Path) -> None:
    """Short bus ids lack the domain that tells GPUs apart: four processes, four GPUs."""
    four = [("a", 0)] * 4 + [("b", 0)] * 4
    text = log(four, ROWS[1:2], new=False)  # each process sees one GPU, on bus 01 of its domain
    (row,) = read(tmp_path, text)
    assert (row.pattern, row.gpus) == ((4, 4), ())
    with pytest.raises(InputError, match="two ranks run on one GPU"):
        read(tmp_path, log(four, ROWS[1:2]))  # whole bus ids are one GPU
    with pytest.raises(InputError, match="two ranks run on one GPU"):
        read(tmp_path, log(four, ROWS[1:2], new=False, per_process=4))


def test_hidden_devices(tmp_path: Path) -> None:
    """Where processes see one GPU each, its number is unknown unless the log was told."""
    text = log([("n1", 0), ("n1", 1), ("n2", 0)], ROWS[1:2])
    hidden = text.replace("device  1", "device  0")
    assert read(tmp_path, hidden).rows[0] == Measurement((2, 1), 153_440_000)
    line = "# optsched gpus: n1:4,6 n2:3\n"
    for told in (line + hidden, hidden.replace("# Using", line + "# Using")):
        assert read(tmp_path, told).rows[0].gpus == (("n1", (4, 6)), ("n2", (3,)))
    assert read(tmp_path, told + hidden).rows[1].gpus == ()  # said of one run, not of the next
    with pytest.raises(
        InputError, match=r"run\.log:4: '# optsched gpus' is not of the pattern 2\+1"
    ):
        read(tmp_path, "# optsched gpus: n1:4-6\n" + hidden)
    with pytest.raises(InputError, match=r"run\.log:1: expected HOST:IDS"):
        read(tmp_path, "# optsched gpus: n1=4\n" + hidden)
    twice = text.replace("device  1 [0000:08:00]", "device  0 [0000:07:00]")
    with pytest.raises(InputError, match="two ranks run on one GPU, device 0 of n1"):
        read(tmp_path, twice)


def test_sizes_are_chosen(tmp_path: Path) -> None:
    """Several sizes need a payload; a missing one is an error that lists those there."""
    with pytest.raises(InputError, match=r"run\.log:3: choose a payload, .*8, 16777216, 2147"):
        read(tmp_path, log(EIGHT, ROWS))
    with pytest.raises(InputError, match=r"run\.log:3: no row of 4096 bytes; the run has 8, 16"):
        read(tmp_path, log(EIGHT, ROWS), payload=4096)
    with pytest.raises(MixedMeasurements, match=r"is of 2147483648 bytes, .*run\.log of 16777216"):
        read(tmp_path, log(EIGHT, ROWS[1:2]) + log(EIGHT, ROWS[2:]))


BAD = {
    "empty": ("", r"run\.log: no run of nccl-tests"),
    "wrong results": (log(EIGHT, ROWS, wrong="3"), r"run\.log:21: #wrong: expected 0 or N/A"),
    "out of bounds": (
        log(EIGHT, ROWS, bounds="4 FAILED"), r"run\.log:23: 4 values are out of bounds",
    ),
    "rank missing": (
        log(EIGHT, ROWS).replace("Rank  3", "Rank  9"), r"run\.log:3: rank 3 is missing",
    ),
    "without MPI": (
        log(EIGHT, ROWS).replace("Rank  7", "Rank  6"), r"run\.log:3: two processes are the same",
    ),
    "ranks of a process": (
        log(EIGHT, ROWS, per_process=5), r"expected 5 ranks a process .* 4001 on host02 has 3",
    ),
    "rank lines lost": (
        log(EIGHT, ROWS).replace("#  Rank  7 Group  0 Pid   4007 on     host02 device  7 "
                                 "[0000:0e:00] NVIDIA H100 80GB HBM3\n", ""),
        r"busbw is 153\.44, .* on 7 ranks makes .*other ranks than the 7 listed",
    ),
    "one rank": (log(EIGHT[:2], ROWS).replace("#  Rank  1", "#"), "a single rank"),
    "contradiction": (
        log(EIGHT, ROWS).replace("version 2.17.6\n", "").replace(
            "# Using devices", "# Using devices\n# all_gather_perf"), "names all_gather, the run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(tmp_path: Path, case: str) -> None:
    """Each fault is found, and named with its line."""
    text, message = BAD[case]
    with pytest.raises(InputError, match=message):
        read(tmp_path, text, payload=16 * MIB)


def test_cut_off(tmp_path: Path) -> None:
    """Of any beginning a whole row of the payload counts, with a warning; else it is refused."""
    text = log(EIGHT, ROWS)
    whole = read(tmp_path, text, payload=16 * MIB)
    row = text.index("\n", text.index(f"{16 * MIB} ")) + 1
    end = text.index("# Avg bus") + len("# Avg bus bandwidth")
    for length in [*range(0, row, 97), row - 1]:
        with pytest.raises(InputError, match=r"cut off|no run of|expected .# Rank|no lines|missing|"
                           "no row|single rank"):  # fmt: skip
            read(tmp_path, text[:length], payload=16 * MIB)
    for length in [*range(row, end, 97), end - 1]:
        with pytest.warns(UserWarning, match=r"run\.log:3: the run is cut off: .* 16777216 bytes"):
            assert read(tmp_path, text[:length], payload=16 * MIB) == whole
    assert read(tmp_path, text[:end], payload=16 * MIB) == whole
    with pytest.raises(InputError, match=r"run\.log:3: the run is cut off: .*; choose a payload"):
        read(tmp_path, text[: end - 1])
    with pytest.raises(InputError, match=r"no row of 2147483648 bytes; .* \(it is cut off\)"):
        read(tmp_path, text[:row], payload=2048 * MIB)
    with pytest.warns(UserWarning, match=r"run\.log:3: the run is cut off"):
        assert len(read(tmp_path, text[:row] + text, payload=16 * MIB)) == 2


def test_pods(tmp_path: Path) -> None:
    """Names of pods become hosts; two pods of one host count their own GPUs, so ids are unknown."""
    path = tmp_path / "pods.txt"
    path.write_text("POD      NODE\nworker-0   h1\nworker-1, h2  # spare\n\nworker-2 h1\n")
    hosts = read_host_map(path)
    assert hosts == {"worker-0": "h1", "worker-1": "h2", "worker-2": "h1"}
    two = [("worker-0", 0), ("worker-0", 1), ("worker-1", 0)]
    (row,) = read(tmp_path, log(two, ROWS[1:2]), hosts=hosts)
    assert (row.pattern, row.gpus) == ((2, 1), (("h1", (0, 1)), ("h2", (0,))))
    text = log([*two, ("worker-2", 0)], ROWS[1:2])
    text = "[0000:0e:00]".join(text.rsplit("[0000:07:00]", 1))  # another GPU of the host
    (row,) = read(tmp_path, text, hosts=hosts)
    assert (row.pattern, row.gpus) == ((3, 1), ())
    told = "# optsched gpus: worker-0:0,1 worker-1:0 worker-2:7\n"
    (row,) = read(tmp_path, told + text, hosts=hosts)
    assert row.gpus == (("h1", (0, 1, 7)), ("h2", (0,)))
    with pytest.raises(InputError, match=r"run\.log:3: worker-2 is not in the host map"):
        read(tmp_path, text, hosts={"worker-0": "h1", "worker-1": "h2"})
    for wrong, message in (("a\n", "expected POD HOST, got 'a'"), ("a b\na c\n", "a is also on b")):
        path.write_text(wrong)
        with pytest.raises(InputError, match=message):
            read_host_map(path)
