"""Tables of the ArrayPipe study in Markdown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.executor.study_baselines import ARRAYS, PARTS, ROLLING, SINGLE, Run
from benchmarks.executor.study_cases import ASSUMPTIONS, MODELS, Case, sweeps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NAMES: Final = {
    "vanilla": "vanilla", "gpipe": "GPipe", "hanayo": "Hanayo",
    "one_f_one_b": "1F1B", "interleaved": "interleaved", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2",
    "published": "array as published", "barrier": "array, barrier", "rolling": "array, rolling",
}  # fmt: skip
SOLVED: Final = ("published", "barrier", "rolling")
PAPER: Final = {"gpipe": 48, "hanayo": 32}
"""Per cent of the time that the paper's arrays save in the mean."""


@dataclass(frozen=True)
class Study:
    """All runs of a file."""

    machine: str
    seconds: float
    seed: int
    rows: dict[tuple[Case, str], Run | None]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Study:
        """From what `arraypipe_study.py run` wrote."""
        rows = {
            (Case(**row["case"]), row["method"]): None if row["run"] is None else Run(**row["run"])
            for row in document["rows"]
        }
        return cls(document["machine"], document["seconds"], document["seed"], rows)

    @property
    def models(self) -> list[str]:
        """Those with runs."""
        return [model for model in MODELS if any(case.model == model for case, _ in self.rows)]

    def run(self, case: Case, model: str, method: str) -> Run | None:
        """One run; None where there is none."""
        return self.rows.get((replace(case, model=model), method))

    def best(self, case: Case, model: str, methods: Iterable[str]) -> tuple[str, Run] | None:
        """The quickest of some methods."""
        found = [(name, self.run(case, model, name)) for name in methods]
        there = [(name, run) for name, run in found if run is not None]
        return min(there, key=lambda pair: pair[1].time, default=None)

    def saved(self, case: Case, model: str, method: str, against: Sequence[str]) -> float | None:
        """Share of the time that a method saves against the best of others."""
        run, other = self.run(case, model, method), self.best(case, model, against)
        return None if run is None or other is None else 1 - run.time / other[1].time


def tables(study: Study) -> dict[str, str]:
    """All tables by name."""
    found = {"conditions": conditions(study), "times": times(study), "saved": savings(study)}
    for name in ("servers", "memory", "bandwidth", "stages"):
        found[name] = sweep(study, name)
    found.update(breakdown=breakdown(study), groups=groups(study),
                 assumptions=assumptions(study), terms=terms(study))  # fmt: skip
    return found


def conditions(study: Study) -> str:
    """Machine, versions and limits."""
    told = study.machine.removeprefix("# ")
    return f"{told}; {study.seconds:g} s a solve on one core, seed {study.seed}."


def times(study: Study) -> str:
    """Seconds for one iteration of every job, by method."""
    base = Case("")
    names = [
        *SINGLE, *(f"{name} rolling" for name in ROLLING), *(f"array {name}" for name in ARRAYS),
        *SOLVED,
    ]  # fmt: skip
    rows = [
        [spoken(name), *(_seconds(study.run(base, model, name)) for model in study.models)]
        for name in names
    ]
    bounds = []
    for model in study.models:
        run = study.run(base, model, "rolling")
        bounds.append("-" if run is None else f"{run.time / run.bound - 1:.1%}")
    rows.append(["gap of rolling to its bound", *bounds])
    return table(["s", *study.models], rows)


def savings(study: Study) -> str:
    """Time saved by the three arrays against every baseline: range and mean over the models."""
    base, rows = Case(""), []
    others = [(NAMES[name], (name,)) for name in SINGLE[1:]]
    for words, against in (*others, ("the best of them", SINGLE)):
        paper = PAPER.get(against[0]) if len(against) == 1 else None
        cells = [
            _range([study.saved(base, model, name, against) for model in study.models])
            for name in SOLVED
        ]
        rows.append([words, *cells, "-" if paper is None else f"{paper} %"])
    return table(["against", *(NAMES[name] for name in SOLVED), "the paper"], rows)


def sweep(study: Study, name: str) -> str:
    """Barrier / rolling / best baseline and its name, seconds, by model."""
    rows = []
    for words, case in sweeps()[name].items():
        cells = [words]
        for model in study.models:
            solved = [_seconds(study.run(case, model, which)) for which in ("barrier", "rolling")]
            best = study.best(case, model, SINGLE)
            other = "-" if best is None else f"{_seconds(best[1])} {NAMES[best[0]]}"
            cells.append("-" if best is None else " / ".join((*solved, other)))
        rows.append(cells)
    return table([name, *study.models], rows)


def breakdown(study: Study) -> str:
    """Shares of device time: forward, backward, overhead, bubble."""
    rows = []
    for model in study.models:
        for name in ("gpipe", "hanayo", "interleaved", "zb_h1", *SOLVED):
            run = study.run(Case(""), model, name)
            if run is not None:
                cells = [f"{value:.1%}" for value in shares(run).values()]
                rows.append([model, NAMES[name], *cells, run.how.split("; ")[-1]])
    return table(["model", "", "forward", "backward", "overhead", "bubble", "how"], rows)


def shares(run: Run) -> dict[str, float]:
    """Parts of device time; overhead is recomputation, updates and switches."""
    total = sum(run.parts.values())
    parts = {name: run.parts[name] / total for name in PARTS}
    overhead = parts["recompute"] + parts["update"] + parts["switch"]
    return {
        "forward": parts["forward"], "backward": parts["backward"], "overhead": overhead,
        "bubble": parts["bubble"],
    }  # fmt: skip


def groups(study: Study) -> str:
    """Smaller arrays one after another: barrier / rolling, what rolling gains, host memory."""
    base, rows = Case(""), []
    ends = {method.rpartition(" ")[2] for _, method in study.rows}
    counts = sorted(int(end) for end in ends if end.isdigit())
    for k in (*counts, 0):
        cells = [str(k) if k else "all"]
        for model in study.models:
            names = [f"{name} {k}" if k else name for name in ("barrier", "rolling")]
            barrier, rolling = (study.run(base, model, name) for name in names)
            if barrier is None or rolling is None:
                cells.append("-")
                continue
            host = (k or base.jobs) * replace(base, model=model).state_bytes / 1e9
            both = f"{_seconds(barrier)} / {_seconds(rolling)}"
            cells.append(f"{both}, {barrier.time / rolling.time:.2f}x, {host:.0f} GB")
        rows.append(cells)
    return table(["jobs", *study.models], rows)


def assumptions(study: Study) -> str:
    """Mean time saved by the array with barrier, under one changed assumption at a time."""
    rows = []
    for name, case in sweeps()["assumptions"].items():
        cells = [ASSUMPTIONS[name]]
        for which in ("published", "barrier"):
            for against in ((b,) for b in PAPER):
                saved = [study.saved(case, model, which, against) for model in study.models]
                cells.append(_mean(saved))
        best = [study.saved(case, model, "barrier", SINGLE) for model in study.models]
        rows.append([*cells, _range(best)])
    heads = [f"{which}: {NAMES[b]}" for which in ("published", "barrier") for b in PAPER]
    return table(["assumption", *heads, "barrier: best baseline"], rows)


def terms(study: Study) -> str:
    """Every case in which a baseline is quicker than an array; of rolling ones than rolling."""
    compared = dict.fromkeys(SOLVED, 0)
    lost: dict[str, list[str]] = {name: [] for name in SOLVED}
    for case in dict.fromkeys(case for case, _ in study.rows):
        for which in SOLVED:
            against = [*SINGLE, *(f"{name} rolling" for name in ROLLING if which == "rolling")]
            run, best = study.run(case, case.model, which), study.best(case, case.model, against)
            if best is None or run is None:
                continue
            compared[which] += 1
            if run.time > best[1].time:
                by = run.time / best[1].time - 1
                lost[which].append(f"{case.words} ({spoken(best[0])}, by {by:.1%})")
    rows = [
        [NAMES[which], str(compared[which]), str(len(lost[which])), "; ".join(lost[which]) or "-"]
        for which in SOLVED
    ]
    return table(["", "cases", "lost", "to"], rows)


def spoken(method: str) -> str:
    """A method in words."""
    name, _, which = method.partition(" ")
    if name == "array":
        return f"Ar{NAMES[which]}"
    return NAMES[name] + (f", {which}" if which else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; numbers are at the right."""
    lines = [head, ["---", *(["--:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(run: Run | None) -> str:
    return "-" if run is None else f"{run.time / 1e6:.3g}"


def _over(values: Iterable[float | None], how: Callable[[list[float]], str]) -> str:
    there = [100 * value for value in values if value is not None]
    return how(there) if there else "-"


def _mean(values: Iterable[float | None]) -> str:
    return _over(values, lambda there: f"{mean(there):.0f} %")


def _range(values: Iterable[float | None]) -> str:
    return _over(
        values, lambda there: f"{min(there):.0f} to {max(there):.0f}, mean {mean(there):.0f} %"
    )
