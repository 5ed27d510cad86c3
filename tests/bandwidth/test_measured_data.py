"""The published measurements: what the loader makes of them, and of other folders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.bandwidth.measured_data import (
    H100_HOSTS,
    LARGE,
    MIXED_HOSTS,
    SMALL,
    VARIABLE,
    MeasuredData,
    load_measured,
)
from optsched.bandwidth.models.patterns import automaton, written_pattern
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

published = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")


@published
def test_tables() -> None:
    """All 493 patterns at both payloads; 1+1 is there twice at 2 GiB, its first run first."""
    data = load_measured()
    every = {written_pattern(row) for row in automaton(4, 8).patterns.tolist()} - {"", "1"}
    for payload, rows, pair in ((SMALL, 493, [38.47]), (LARGE, 494, [46.65, 46.88])):
        table = data.table(payload)
        assert (table.op, table.payload, table.mixed, len(table)) == (
            "all_reduce", payload, False, rows,
        )  # fmt: skip
        assert {written_pattern(row.pattern) for row in table} == every
        assert [row.value / 1e6 for row in table if row.pattern == (1, 1)] == pair
    values = {written_pattern(row.pattern): row.value for row in data.table()}
    wanted = {"4+4": 337.17, "6+2": 153.44, "7+1": 77.83, "5+5": 412.49, "8+8": 459.82,
              "8+8+8": 299.40, "8+8+8+8": 316.63, "4+4+4": 195.04}  # fmt: skip
    assert {key: values[key] / 1e6 for key in wanted} == wanted
    assert data.table(mixed=True).mixed


@published
def test_h100() -> None:
    """Four hosts, each with tables of its own at either payload."""
    data = load_measured()
    large, small = data.h100(), data.h100(payload=SMALL)
    for cluster in (large, small):
        assert tuple(host.name for host in cluster.hosts) == H100_HOSTS
        assert (cluster.n_gpus, len(cluster.types)) == (32, 4)
        for kind in cluster.types:
            assert kind.intra is not None and kind.intra.by_subset
            assert (kind.nics, kind.nic_rate, kind.gpus) == (8, 50.0, 8)
            assert kind.links is not None and kind.links[0][1] == "NV16"
    best = max(kind.intra.of(255) for kind in large.types if kind.intra)
    assert best / 1e6 == pytest.approx(473.4, abs=0.5)
    assert all(
        a.intra.of(255) > b.intra.of(255)
        for a, b in zip(large.types, small.types, strict=True)
        if a.intra and b.intra
    )


@published
def test_het_4mix() -> None:
    """Four hosts of different links; A6000 pairs reach more over NVLink than across."""
    cluster = load_measured().het_4mix()
    assert tuple(host.name for host in cluster.hosts) == MIXED_HOSTS
    kinds = {kind.name: kind for kind in cluster.types}
    a6000, v100 = kinds["A6000"].intra, kinds["V100"].intra
    assert a6000 is not None and v100 is not None
    assert min(a6000.of(3 << i) for i in (0, 2, 4, 6)) > a6000.of(0b1001)
    assert v100.of(0b11) == 22_020_000
    assert kinds["4090"].links is not None and "SYS" in kinds["4090"].links[0]


@published
def test_unknown_payload() -> None:
    """A payload that nobody measured is refused, and those that are there named."""
    data = load_measured()
    for load in (data.table, data.h100):
        with pytest.raises(
            InputError, match="no runs of 4096 bytes, there is 16777216, 2147483648"
        ):
            load(4096)


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, a wrong one, or files that are not as described."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InputError, match=f"give the folder .* or set {VARIABLE}"):
        load_measured()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(InputError, match="there is no folder"):
        load_measured()
    with pytest.raises(InputError, match=r"no h100_cross_host\.csv in it"):
        load_measured(tmp_path)
    path = tmp_path / "h100_cross_host.csv"
    head = "payload_bytes,row,op,pattern,busbw_GBps\n"
    for text, message in {
        head.replace(",row", "") + "1,a,1,2\n": ':1: column "row" is missing',
        head + "1,0,all_gather_perf,1+1,3\n": ":2: op: expected all_reduce_perf",
        head + "1,0,all_reduce_perf,1+x,3\n": "row 0: expected counts",
        head + "1,0,all_reduce_perf,1+1,fast\n": "row 0: expected GB/s, got 'fast'",
        head + "1,0,all_reduce_perf,1+1,-3\n": "row 0: expected GB/s >= 0",
        head + '1,0,all_reduce_perf,1+1,"3\n': "not valid CSV",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            MeasuredData(tmp_path).table(1)
    (tmp_path / "intra_host").mkdir()
    for text, message in {
        '{"bandwidth": ': r"4090\.json:1:\d+: not valid JSON",
        "[]": r"4090\.json: bandwidth: expected a table",
        '{"bandwidth": {"0,1": 3}}': r"4090\.json: bandwidth: 246 of the subsets are missing",
    }.items():
        (tmp_path / "intra_host" / "4090.json").write_text(text)
        with pytest.raises(InputError, match=message):
            MeasuredData(tmp_path).het_4mix()
