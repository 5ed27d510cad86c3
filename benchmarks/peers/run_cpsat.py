"""Raw CP-SAT on a disjunctive graph, modelled as its own examples do: no hint, no bound."""

from __future__ import annotations

from typing import Any

from protocol import answer, request, versions


def build(graph: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The model and its start variables."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    duration, machine = graph["duration"], graph["machine"]
    horizon = sum(duration) + sum(max(0, w - duration[i]) for i, _, w in graph["arcs"])
    horizon += sum(graph["setup_in"]) + sum(graph["setup_out"])
    start = [model.new_int_var(0, horizon, f"s{i}") for i in range(len(duration))]
    interval = [
        model.new_fixed_size_interval_var(s, p, f"i{i}")
        for i, (s, p) in enumerate(zip(start, duration, strict=True))
    ]
    for i, j, weight in graph["arcs"]:
        model.add(start[j] >= start[i] + weight)
    for k in range(len(graph["memory"])):
        on = [i for i, m in enumerate(machine) if m == k]
        model.add_no_overlap([interval[i] for i in on])
        _setups(model, graph, on, start)
        if graph["memory"][k]:
            _memory(model, graph, k, on, start, interval, horizon)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, [s + p for s, p in zip(start, duration, strict=True)])
    model.minimize(makespan)
    return model, start


def _setups(model: Any, graph: dict[str, Any], on: list[int], start: list[Any]) -> None:
    """One literal a pair: who comes first, with the setup between them."""
    into, out, family = graph["setup_in"], graph["setup_out"], graph["family"]
    if not any(into[i] or out[i] for i in on):
        return
    for place, i in enumerate(on):
        for j in on[place + 1 :]:
            if family[i] == family[j]:
                continue
            first = model.new_bool_var("")
            gap = graph["duration"][i] + out[i] + into[j]
            model.add(start[j] >= start[i] + gap).only_enforce_if(first)
            gap = graph["duration"][j] + out[j] + into[i]
            model.add(start[i] >= start[j] + gap).only_enforce_if(~first)


def _memory(
    model: Any, graph: dict[str, Any], k: int, on: list[int], start: list[Any],
    interval: list[Any], horizon: int,
) -> None:  # fmt: skip
    """What is held from the start of one block to the end of another, as a cumulative."""
    held, sizes = [], []
    for resource, size, i, j in graph["holdings"]:
        if resource == k:
            end = horizon if j < 0 else start[j] + graph["duration"][j]
            length = model.new_int_var(0, horizon, "")
            held.append(model.new_interval_var(start[i], length, end, ""))
            sizes.append(size)
    for i in on:
        if graph["workspace"][i]:
            held.append(interval[i])
            sizes.append(graph["workspace"][i])
    model.add_cumulative(held, sizes, graph["memory"][k])


def main() -> None:
    """Build, search, answer."""
    asked, clock = request()
    from watched_cpsat import Watched

    parameters = {"random_seed": asked["seed"], **asked["options"]}
    watched = Watched(clock, asked["seconds"], parameters)
    from ortools.sat.python import cp_model

    model, start = build(asked["graph"])
    solver = cp_model.CpSolver()
    solver.solve(model)
    starts = None
    if watched.status in ("optimal", "feasible"):
        starts = [solver.value(s) for s in start]
    answer(starts=starts, versions=versions("ortools"), **watched.proof())


if __name__ == "__main__":
    main()
