"""The conformance suite of bandwidth models: what searches and users rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.model import (
    OPERATIONS,
    BandwidthModel,
    CountModel,
    UnmeasuredPattern,
)
from optsched.bandwidth.topology.rates import MOST, UNMEASURED
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection
    from optsched.model.schedule import IntArray

SETS = 300


def check_bandwidth_model(model: BandwidthModel, seed: int = 0) -> None:
    """Check a model; one error that lists all failures.

    Parameters
    ----------
    model
        Any.
    seed
        Of the random sets of GPUs it is asked about.

    Raises
    ------
    AssertionError
        With one line per failure.
    """
    failures = []
    for check in (_facts, _predictions, _refusals, _repeats, _intervals, _tables, _updates):
        try:
            check(model, _sets(model, seed))
        except AssertionError as error:
            failures.append(f"{check.__name__.strip('_')}: {error}")
        except Exception as error:
            failures.append(f"{check.__name__.strip('_')}: raised {type(error).__name__}: {error}")
    if failures:
        name = type(model).__name__
        raise AssertionError(f"{name} fails {len(failures)} checks:\n  " + "\n  ".join(failures))


def _sets(model: BandwidthModel, seed: int) -> Selection:
    """Nothing, single GPUs, whole hosts, everything, and random sets."""
    random = np.random.default_rng(seed)
    n, first = model.cluster.n_gpus, model.cluster.first
    rows = [np.zeros(n, np.bool_), np.ones(n, np.bool_)]
    rows += [np.arange(n) == gpu for gpu in range(min(n, 8))]
    for h in range(min(model.cluster.n_hosts, 8)):
        rows.append((np.arange(n) >= first[h]) & (np.arange(n) < first[h + 1]))
    for _ in range(SETS):
        rows.append(random.random(n) < random.random())
    return np.array(rows)


def _known(model: BandwidthModel, rows: Selection) -> tuple[Selection, IntArray]:
    """The rows whose bandwidth the model knows, and these."""
    kept, values = [], []
    for row in rows:
        try:
            values.append(int(model.predict(row[None])[0]))
        except UnmeasuredPattern:
            continue
        kept.append(row)
    return np.array(kept).reshape(len(kept), model.cluster.n_gpus), np.array(values, np.int64)


def _facts(model: BandwidthModel, rows: Selection) -> None:
    assert model.op in OPERATIONS, f"op: {model.op!r} is none of {', '.join(OPERATIONS)}"
    assert model.payload is None or model.payload > 0, f"payload: {model.payload}"
    assert isinstance(model.intra_monotone, bool), "intra_monotone: expected true or false"
    assert len(model.sha256) == 64, "sha256: expected 64 hexadecimal digits"


def _predictions(model: BandwidthModel, rows: Selection) -> None:
    known, values = _known(model, rows)
    together = model.predict(known)
    assert together.dtype == np.int64 and together.shape == (len(known),), (
        f"predict: {together.dtype} of shape {together.shape}"
    )
    assert (together == values).all(), "predict: a set has another value among others"
    assert (values >= 0).all() and (values < MOST).all(), "predict: a value out of range"
    assert (values[known.sum(axis=1) <= 1] == 0).all(), "predict: less than two GPUs have traffic"
    assert len(model.predict(known[:0])) == 0, "predict: no row, but values"


def _refusals(model: BandwidthModel, rows: Selection) -> None:
    bad: list[Any] = [rows[0], rows.astype(np.int64), rows[:, :-1]]
    for given in bad:
        try:
            model.predict(given)
        except InputError:
            continue
        raise AssertionError(f"predict: takes {given.dtype} of shape {given.shape}")


def _repeats(model: BandwidthModel, rows: Selection) -> None:
    known, values = _known(model, rows)
    before = known.copy()
    assert (model.predict(known) == values).all(), "predict: twice asked, two answers"
    assert (known == before).all(), "predict: changes what it is given"


def _intervals(model: BandwidthModel, rows: Selection) -> None:
    known, values = _known(model, rows)
    low, high = model.interval(known)
    assert (low <= values).all() and (values <= high).all(), "interval: does not hold the value"
    assert (low >= 0).all(), "interval: begins below 0"


def _tables(model: BandwidthModel, rows: Selection) -> None:
    """The compiled tables say the same as `predict`."""
    tables = model.tables()
    if tables is None:
        return
    cluster = model.cluster
    known, values = _known(model, rows)
    for row, value in zip(known, values.tolist(), strict=True):
        counts = np.add.reduceat(row, cluster.first[:-1], dtype=np.int64)
        found = int(tables.network[tables.automaton.state(counts)])
        for h in range(cluster.n_hosts):
            table = tables.intra[cluster.type_of[h]]
            if counts[h] < 2 or table is None:
                continue
            if len(table) == int(cluster.sizes[h]) + 1:
                found = min(found, int(table[counts[h]]))
            else:
                local = row[cluster.first[h] : cluster.first[h + 1]]
                found = min(found, int(table[int((1 << np.flatnonzero(local)).sum())]))
        assert found == value, f"tables: {found}, predict: {value}, counts {counts.tolist()}"
    if isinstance(model, CountModel):
        value_, low, high = (
            np.asarray(model.network(tables.automaton.patterns, which))
            for which in ("value", "low", "high")
        )
        there = value_ != UNMEASURED
        assert (low <= value_)[there].all() and (value_ <= high)[there].all(), (
            "network: a value is outside of its interval"
        )


def _updates(model: BandwidthModel, rows: Selection) -> None:
    """Learning nothing changes nothing; a model is a value."""
    try:
        same = model.update([])
    except NotImplementedError:
        return
    known, values = _known(model, rows)
    assert (same.predict(known) == values).all(), "update: of nothing changes predictions"
