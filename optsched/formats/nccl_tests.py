"""Logs of nccl-tests: GPUs and bus bandwidths of every run."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.bandwidth.models.collectives import check_rates, named_in, others_alike
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.bandwidth.models.model import OPERATIONS
from optsched.bandwidth.topology.foreign import without_escapes
from optsched.bandwidth.topology.names import parse_gpus
from optsched.bandwidth.topology.rates import kilobytes
from optsched.errors import InputError
from optsched.formats.registry import looks_like
from optsched.io.files import read_text
from optsched.io.values import one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# mpirun --tag-output and --timestamp-output, torchrun, kubectl logs --prefix; ray; srun -l; pdsh;
# timestamps, of containers too; docker compose
_TAG = re.compile(
    r"^(?:\s*(?:\[[^\]\s][^\]]{0,200}\]:?|<std(?:out|err)>:?|\([^()]{0,200}=[^()]{0,200}\)"
    r"|\d{1,6}:(?=\s)|[A-Za-z][\w.\-]*:(?=\s)|[A-Za-z][\w.\-]*\s*\|"
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?(?:\s+std(?:out|err)\s+[FP])?"
    r"|[A-Z][a-z]{2}\s[A-Z][a-z]{2}\s+\d+\s[\d:]{8}\s\d{4}))+(?=\s*[#\d])"
)
_START = re.compile(r"#\s*nThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})\b")
_RANK = re.compile(
    r"#\s*Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d{1,4})\s+"
    r"\[([0-9a-fA-Fx:.]+)\]"
)
_GPUS = re.compile(r"#\s*optsched gpus:\s*(.*)")
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})\s+(\w+)")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\b")
_ROW = re.compile(r"\s*\d{1,18}\s+\d{1,18}\s+[a-z]\w*\s")
_RATE = re.compile(r"\d{1,9}(\.\d{1,9})?(e[+-]?\d{1,2})?")
_ROUNDED_SIZES: Final = ("all_gather", "reduce_scatter", "all_to_all")
"""Their sizes are rounded down to a multiple of 16 bytes a rank."""


_KEPT: Final = ("algbw", "busbw", "#wrong", "redop", "root")
"""Kept columns of a row; the first of each name is out of place."""


class _Rank(NamedTuple):
    number: int
    group: int
    host: str
    pid: str
    device: int
    bus: str


class _Row(NamedTuple):
    line: int
    size: int
    algbw: str
    busbw: str
    wrong: str
    redop: str
    root: str


@dataclass
class _Run:
    """Output of one start of a test."""

    line: int
    per_process: int
    op: str | None = None
    ranks: list[_Rank] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    complete: bool = False


def read_logs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    op: str = "all_reduce",
    payload: int | None = None,
    hosts: Mapping[str, str] | None = None,
) -> MeasurementTable:
    """Out-of-place bus bandwidths of one payload; a file may hold several runs.

    GPU ids are the device numbers of the processes. With ``CUDA_VISIBLE_DEVICES``, print
    ``# optsched gpus: n01:4-7 n02:0,1`` into the log, before the run or in it; without it, if
    several processes use one number for different GPUs, the measurement has no GPUs. Of a log that
    ends before ``# Avg bus bandwidth`` complete rows count, with a warning, if a payload is chosen.

    Parameters
    ----------
    paths
        A file, a pattern such as ``runs/*.log`` (taken in the order of names), or several of them.
    op
        The collective; a log that names another is refused.
    payload
        Bytes; None if all runs have one size, otherwise `MixedMeasurements` is raised. Sizes that
        nccl-tests rounds to the ranks are also accepted up to 16 bytes a rank below it.
    hosts
        Hosts of the names in the log, such as pods'; see `read_host_map`. A name that is not in it
        is refused.
    """
    one_of("op", op, OPERATIONS)
    found: list[Measurement] = []
    size, first = payload, ""
    for path in _files(paths):
        for run in _runs(read_text(path), path):
            if hosts is not None:
                _rename(run, hosts, f"{path}:{run.line}")
            chosen = _chosen(run, op, payload, path)
            if size is None:
                size, first = chosen[0].size, path
            elif payload is None and chosen[0].size != size:
                raise MixedMeasurements(
                    f"{path}:{chosen[0].line}: is of {chosen[0].size} bytes, {first} of {size}: "
                    "choose a payload"
                )
            found += [_measurement(run, row, op, path) for row in chosen]
    return MeasurementTable(tuple(found), op, size)


def read_host_map(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read pods and their hosts: two names a line, as ``kubectl get pods`` prints them."""
    found: dict[str, str] = {}
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        names = raw.partition("#")[0].replace(",", " ").split()
        if not names or [name.upper() for name in names] in (["POD", "HOST"], ["POD", "NODE"]):
            continue
        if len(names) != 2:
            raise InputError(f"{path}:{number}: expected POD HOST, got {raw.strip()!r:.60}")
        if found.setdefault(names[0], names[1]) != names[1]:
            raise InputError(f"{path}:{number}: {names[0]:.60} is also on {found[names[0]]:.60}")
    return found


def _rename(run: _Run, hosts: Mapping[str, str], place: str) -> None:
    """Replace names by hosts."""
    for name in [rank.host for rank in run.ranks] + [name for name, _ in run.gpus]:
        if name not in hosts:
            raise InputError(f"{place}: {name:.60} is not in the host map (hosts=, --host-map)")
    run.ranks = [rank._replace(host=hosts[rank.host]) for rank in run.ranks]
    parts: dict[str, list[int]] = {}
    for name, ids in run.gpus:
        parts.setdefault(hosts[name], []).extend(ids)
    run.gpus = tuple((host, tuple(sorted(ids))) for host, ids in parts.items())


def _files(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise InputError("paths: expected at least one log")
    found: list[str] = []
    for path in given:
        name = os.fspath(path)
        if glob.has_magic(name) and not Path(name).exists():
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise InputError(f"paths: no file is called {name!r:.200}")
            found += matches
        else:
            found.append(name)
    return found


def _runs(text: str, path: str) -> list[_Run]:
    """Return the runs of a log; truncated runs are not `complete`."""
    runs: list[_Run] = []
    op: str | None = None
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    lines = [_TAG.sub("", line) for line in without_escapes(text).splitlines()]
    prefix = ""
    if lines and not text.endswith("\n") and not _AVERAGE.match(lines[-1].strip()):
        lines.pop()  # may have lost its end
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        run = runs[-1] if runs and not runs[-1].complete else None
        if (at := line.find("# nThread ")) > 0:
            prefix = line[:at]  # of all lines, if the launcher is not a known one
        line = line.removeprefix(prefix)
        if match := _START.match(line.strip()):
            runs.append(_Run(number, int(match[1]) * int(match[2]), op, gpus=gpus))
            op, gpus = None, ()
        elif match := _GPUS.match(line.strip()):
            gpus = parse_gpus(match[1], place)
            if run is not None:  # belongs to the run that is under way
                run.gpus, gpus = gpus, ()
        elif (named := named_in(line, place)) is not None:
            of = runs[-1] if runs and "concluded" in line else run if run and not run.rows else None
            if of is None:
                op = named  # of the next run
            elif of.op not in (None, named):
                raise InputError(f"{place}: names {named}, the run began as {of.op}")
            else:
                of.op = named
        elif run is not None:
            _read_line(run, line, place, number)
        elif runs and _AVERAGE.match(line.strip()):
            raise InputError(f"{place}: two runs wrote into each other: give every run its own log")
    if not runs:
        raise InputError(
            f"{path}: no run of nccl-tests in it (a line '# nThread ...' starts one)"
            f"{looks_like(text)}"
        )
    return runs


def _read_line(run: _Run, line: str, place: str, number: int) -> None:
    """Read one line within a run; other output of NCCL is skipped."""
    stripped = line.strip()
    heads = stripped[1:].split() if stripped.startswith("#") else []
    if heads[:1] == ["Rank"]:
        match = _RANK.match(stripped)
        if match is None:
            raise InputError(
                f"{place}: expected '# Rank .. Pid .. on HOST device .. [..]', got {stripped!r:.60}"
            )
        rank, group, pid, host, device, bus = match.groups()
        run.ranks.append(_Rank(int(rank), int(group or 0), host, pid, int(device), bus))
    elif {"size", "algbw", "busbw"} <= set(heads):
        if run.columns and run.columns != heads:
            raise InputError(f"{place}: the columns change in mid-run")
        run.columns = heads
    elif match := _BOUNDS.match(stripped):
        if int(match[1]) or match[2] != "OK":
            raise InputError(
                f"{place}: {match[1]} values are out of bounds: this run's results are wrong"
            )
    elif _AVERAGE.match(stripped):
        run.complete = True  # the value itself averages sizes: of no use
    elif _ROW.match(line):
        cells, columns = stripped.split(), run.columns
        if not columns:
            raise InputError(f"{place}: a row of numbers before the line that names the columns")
        if len(cells) != len(columns):
            raise InputError(
                f"{place}: expected {len(columns)} columns ({' '.join(columns[:4])} ...), "
                f"got {len(cells)} (cut off?)"
            )
        if "#wrong" not in columns:
            raise InputError(f"{place}: no column #wrong: expected nccl-tests 2.12 or later")
        kept = (cells[columns.index(key)] if key in columns else "" for key in _KEPT)
        run.rows.append(_Row(number, int(cells[0]), *kept))


def _chosen(run: _Run, op: str, payload: int | None, path: str) -> list[_Row]:
    """Return the rows of the payload."""
    place = f"{path}:{run.line}"
    if run.op not in (None, op):
        raise InputError(f"{place}: is a run of {run.op}, expected {op}")
    cut = f"{place}: the run is cut off: it has no line '# Avg bus bandwidth'"
    if not run.complete and payload is None:
        raise InputError(f"{cut}; choose a payload (payload=, --payload) to take its rows")
    _check_ranks(run, place)
    sizes = sorted({row.size for row in run.rows})
    listed = ", ".join(map(str, sizes[:8])) + ", ..." * (len(sizes) > 8)
    if not sizes:
        raise InputError(f"{place}: the run has no row of results")
    if payload is None:
        if len(sizes) > 1:
            raise InputError(f"{place}: choose a payload, the run has several: {listed}")
        return run.rows
    below = 16 * len(run.ranks) if op in _ROUNDED_SIZES else 1
    rows = [row for row in run.rows if payload - below < row.size <= payload]
    if not rows:
        lost = " (it is cut off)" * (not run.complete)
        raise InputError(f"{place}: no row of {payload} bytes; the run has {listed}{lost}")
    if not run.complete:
        warnings.warn(f"{cut}; its rows of {payload} bytes are taken", stacklevel=3)
    largest = max(row.size for row in rows)
    return [row for row in rows if row.size == largest]


def _check_ranks(run: _Run, place: str) -> None:
    ranks = run.ranks
    if not ranks:
        raise InputError(f"{place}: no lines '# Rank ...' say which GPUs took part")
    if len({rank.group for rank in ranks}) > 1:
        raise InputError(f"{place}: several groups ran at once (NCCL_TESTS_SPLIT): measure each")
    numbers = [rank.number for rank in ranks]
    if sorted(numbers) != list(range(len(ranks))):
        missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
        if missing:
            raise InputError(f"{place}: rank {missing[0]} is missing among {len(ranks)} ranks")
        raise InputError(
            f"{place}: two processes are the same rank (was nccl-tests built without MPI?)"
        )
    for (host, pid), number in Counter((rank.host, rank.pid) for rank in ranks).items():
        if number % max(1, run.per_process):  # process ids of different containers may be equal
            raise InputError(
                f"{place}: expected {run.per_process} ranks a process (nThread x nGpus), "
                f"process {pid} on {host} has {number}"
            )
    if len(ranks) == 1:
        raise InputError(f"{place}: a single rank has no bus bandwidth")


def _measurement(run: _Run, row: _Row, op: str, path: str) -> Measurement:
    place = f"{path}:{row.line}"
    if row.wrong not in ("0", "N/A"):
        raise InputError(f"{place}: #wrong: expected 0 or N/A, got {row.wrong!r:.20}")
    for name, cell in (("algbw", row.algbw), ("busbw", row.busbw)):
        if not _RATE.fullmatch(cell):
            raise InputError(f"{place}: {name}: expected GB/s, got {cell!r:.20}")
    value = kilobytes(f"{place}: busbw", float(row.busbw))
    rates = (float(row.algbw), float(row.busbw))
    check_rates(rates, (row.redop, row.root), op, len(run.ranks), place)
    others = [] if run.op else others_alike(rates, (row.redop, row.root), op, len(run.ranks))
    if others:
        warnings.warn(
            f"{place}: no line names a program: taken as {op}, but {', '.join(others)} would "
            "print the same",
            stacklevel=3,
        )
    gpus, pattern = _gpus(run, place)
    if run.gpus and tuple(sorted((len(ids) for _, ids in run.gpus), reverse=True)) != pattern:
        raise InputError(
            f"{path}:{run.line}: '# optsched gpus' is not of the pattern "
            f"{'+'.join(map(str, pattern))} that the ranks have"
        )
    return Measurement(pattern, value, run.gpus or gpus)


def _gpus(run: _Run, place: str) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, ...]]:
    """Return the hosts with their GPU ids, if known, and the pattern."""
    hosts: dict[str, list[int]] = {}
    # a bus without its domain, such as [0x01], may be that of several GPUs, one a process
    seen = Counter((r.host, r.device, r.bus, "" if ":" in r.bus else r.pid) for r in run.ranks)
    for (host, device, _, _), times in seen.items():
        if times > 1:
            raise InputError(f"{place}: two ranks run on one GPU, device {device} of {host}")
        hosts.setdefault(host, []).append(device)
    pattern = tuple(sorted(map(len, hosts.values()), reverse=True))
    if any(len(set(ids)) < len(ids) for ids in hosts.values()):
        return (), pattern  # each process counts its own GPUs from 0
    return tuple((host, tuple(sorted(ids))) for host, ids in hosts.items()), pattern
