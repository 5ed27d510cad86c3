"""Precedences of a schedule: arcs, and neighbours in the orders of the resources."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import InputError, MissingExtra
from optsched.model.schedule import COLUMNS

if TYPE_CHECKING:
    import networkx
    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule

_SAFE = 1 << 61


class Links(NamedTuple):
    """Pairs of operations, sorted by head; neighbours on a resource come before arcs.

    The head starts at least ``duration[tail] + wait - tokens * period`` after the tail.
    ``resource`` is -1 for an arc; ``wait`` is the lag of an arc, or the setup between neighbours;
    ``tokens`` is the number of cycles from tail to head, 0 in a one-shot schedule.
    """

    tail: IntArray
    head: IntArray
    resource: IntArray
    wait: IntArray
    tokens: IntArray

    def where(self, keep: npt.NDArray[np.bool_] | IntArray) -> Links:
        """Some of the links, by flags or in the order of these places."""
        return Links(*(column[keep] for column in self))


def links(schedule: Schedule) -> Links:
    """Arcs and neighbours on resources, in a periodic schedule also across the cycle's end."""
    s, arcs = schedule, schedule.arcs
    rows: list[tuple[int, int, int, int]] = []
    for r, row in enumerate([] if s.sequences is None else s.sequences.to_lists()):
        rows += [(i, j, r, 0) for i, j in itertools.pairwise(row)]
        if s.period is not None and row:
            rows.append((row[-1], row[0], r, 1))
    left, right, resource, wraps = np.array(rows, np.int64).reshape(-1, 4).T
    setup = s.setups(left, right)
    tokens = arcs.distance + s.offset[arcs.head] - s.offset[arcs.tail]
    head = np.concatenate([right, arcs.head])
    order = np.argsort(head, kind="stable")
    return Links(
        np.concatenate([left, arcs.tail])[order],
        head[order],
        np.concatenate([resource, np.full(len(arcs.tail), -1)])[order],
        np.concatenate([setup, arcs.lag])[order],
        np.concatenate([wraps, tokens])[order],
    )


def tight_links(schedule: Schedule) -> Links:
    """Links with a head that starts as early as the tail allows."""
    if schedule.start is None:
        raise InputError("this graph is not scheduled: it has no starts")
    found, period = links(schedule), schedule.period or 0
    # Python integers where int64 could overflow
    exact = period * int(np.abs(found.tokens).max(initial=0)) > _SAFE
    later = found.tokens.astype(object if exact else np.int64) * period
    ready = schedule.end[found.tail] + found.wait - later
    return found.where(np.asarray(schedule.start[found.head] == ready, np.bool_))


def to_networkx(schedule: Schedule) -> networkx.DiGraph[int]:
    """Make a `networkx.DiGraph`: operations are nodes with all their fields.

    Edges have the start-to-start ``weight``, arcs also ``kind="conjunctive"``, ``lag`` and
    ``distance``, neighbours on a resource ``kind="machine"`` and ``resource``. Edges of a periodic
    schedule have ``tokens``, the cycles they span; the last operation of a resource precedes the
    first one again. Of parallel edges the one with the largest ``weight - tokens * period`` stays.
    """
    try:
        import networkx as nx
    except ImportError:
        raise MissingExtra("the networkx export", "all") from None
    s, found = schedule, links(schedule)
    graph = nx.DiGraph(name=s.name, time_unit=s.time_unit, period=s.period)
    columns = {key: getattr(s, key).tolist() for key in COLUMNS if key != "deadline"}
    columns |= {"resources": s.op_resources.to_lists()}
    columns |= {} if s.start is None else {"start": s.start.tolist()}
    for i in range(s.n_operations):
        graph.add_node(i, **{key: column[i] for key, column in columns.items()})
    edges: list[tuple[int, int, int, dict[str, Any]]] = []
    for i, j, resource, wait, tokens in zip(*(c.tolist() for c in found), strict=True):
        weight = columns["duration"][i] + wait
        fields = {"weight": weight, **({} if s.period is None else {"tokens": tokens})}
        if resource < 0:
            distance = tokens - columns["offset"][j] + columns["offset"][i]
            fields |= {"kind": "conjunctive", "lag": wait, "distance": distance}
        else:
            fields |= {"kind": "machine", "resource": resource}
        edges.append((weight - tokens * (s.period or 0), i, j, fields))
    edges.sort(key=lambda edge: edge[0])  # stable; a later edge replaces an earlier one
    graph.add_edges_from((i, j, fields) for _, i, j, fields in edges)
    return graph
