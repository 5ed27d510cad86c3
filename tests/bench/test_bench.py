"""`optsched bench`: rows that are never lost or doubled, processes that end, honest tables."""

from __future__ import annotations

import csv
import json
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import PATIENCE, Cli, start

from optsched import InputError
from optsched.bench import run, table
from optsched.bench.instances import Known, load, read_bounds
from optsched.bench.rows import COLUMNS, Results, Row
from optsched.bench.run import Task, run_all
from optsched.bench.summary import ALL, primal_integral, summarise
from optsched.model import document

SHOP = "3 3\n0 3 1 2 2 2\n0 2 2 1 1 4\n1 4 2 3 0 1\n"
BENCH = ("bench", "shop.txt", "--solvers", "dispatch", "--iterations", "50", "-o", "r.csv")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Cli:
    """The program in a folder with shop.txt and other.txt; compiling is left to the solves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "missing_kernels", lambda tasks: [])
    monkeypatch.delenv("OPTSCHED_JSSP_BOUNDS", raising=False)
    Path("shop.txt").write_text(SHOP)
    Path("other.txt").write_text(SHOP.replace("0 3 1", "0 4 1"))
    return Cli(tmp_path, monkeypatch, capsys)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be run."""

    def fail(*_: Any) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(run, "run_all", fail)


def row(instance: str = "ft06", solver: str = "tabu", **rest: Any) -> Row:
    """A row of a solve that never was."""
    usual: dict[str, Any] = {
        "instance": instance, "family": "ft", "size": "6x6", "operations": 36,
        "sha256": f"hash of {instance}", "solver": solver, "options": "{}", "seed": 0, "workers": 2,
        "time_limit": 10.0, "iterations": None, "version": "1", "status": "feasible",
        "objective": 55, "lower_bound": 50, "time_to_best": 1.0, "time_to_proof": None,
        "seconds": 10.0, "wall_seconds": 10.5, "cpu_seconds": 20.0, "history": "[]", "error": "",
        "machine": "m", "versions": "v", "finished": "now",
    }  # fmt: skip
    return Row(**{**usual, **rest})


# the command


def test_run_and_resume(cli: Cli) -> None:
    """Every solve once: the same command runs nothing, another seed only what is new."""
    ran = cli(*BENCH, "other.txt", "--jobs", "2")
    assert ran.code == 0 and ran.err.count("dispatch  seed") == 2
    first = Path("r.csv").read_text()
    with Path("r.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(COLUMNS) and len(rows) == 2
    assert {(r["instance"], r["seed"]) for r in rows} == {("shop", "0"), ("other", "0")}
    for found in rows:
        assert found["status"] in ("optimal", "feasible") and not found["error"]
        assert 0 < float(found["seconds"]) < float(found["wall_seconds"])
        assert float(found["cpu_seconds"]) > 0 and "numpy" in found["versions"]
        history = json.loads(found["history"])
        assert history[-1][1:] == [int(found["objective"]), int(found["lower_bound"])]
    again = cli(*BENCH, "other.txt")
    assert (again.code, again.err) == (0, "") and Path("r.csv").read_text() == first
    assert "2 rows in r.csv" in again.out and "shop" in again.out
    third = cli(*BENCH, "--seeds", "2")
    assert third.code == 0 and third.err.count("seed 1") == 1
    assert Path("r.csv").read_text().startswith(first)


def test_picture_and_latex(cli: Cli) -> None:
    """A profile and a row of gaps per solver; a bad name is refused before anything runs."""
    pytest.importorskip("matplotlib")
    words = ("--plot", "gaps.svg", "--latex", "gaps.tex", "--quiet")
    ran = cli(*BENCH, "--solvers", "dispatch,tabu", *words)
    assert ran.code == 0 and ran.err == ran.out == ""
    picture = Path("gaps.svg").read_text()
    assert all(f'id="{part}-{k}"' in picture for part in ("profile", "gaps") for k in (0, 1))
    table = Path("gaps.tex").read_text()
    assert table.startswith("\\begin{tabular}{lrrrrr}\n\\toprule\n")
    assert table.count(" \\\\\n") == 3 and "\\%" in table and "\\textbf{0.00" in table
    assert ".png" in cli.refused(*BENCH, "--plot", "gaps.gif")
    assert "two outputs" in cli.refused(
        *BENCH, "--latex", "r.txt", "--plot", "r.txt.png", "--latex", "r.txt.png"
    )


def test_latex_escapes_names() -> None:
    """Names are data: no command, comment or column can come from them."""
    found = table.latex(summarise([row("50 % of {a_b}\\x & ~^<")]))
    line = next(line for line in found.splitlines() if line.startswith("50"))
    assert r"50 \% of \{a\_b\}\textbackslash{}x \& \textasciitilde{}" in line
    assert re.sub(r"\\&", "", line).count("&") == 4


def test_contradictions_are_failures(cli: Cli) -> None:
    """Results beyond known bounds: said in the table, and exit code 1."""
    Path("known.csv").write_text("instance,lb,ub\nshop,900,1000\n")
    ran = cli(*BENCH, "--best-known", "known.csv")
    assert ran.code == 1 and "900 is known as a bound, but dispatch" in " ".join(ran.out.split())
    ran = cli(*BENCH, "--best-known", "known.csv", "--quiet")
    assert (ran.code, ran.out) == (1, "") and ran.err.startswith("failed: shop: 900 is known")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--solvers", "tabbu"), "solver: there is no 'tabbu'"),
        (("--option", "x=1"), "option: dispatch has no option 'x'"),
        (
            ("--best-known", "shop.txt"),
            'shop.txt:1: column "instance" is missing; needed:',
        ),
        (("-o", "no/r.csv"), "no/r.csv: cannot be written (there is no folder no)"),
        (("sub/shop.txt",), "sub/shop.txt: another instance is called shop too (shop.txt)"),
        (("same.txt",), "same.txt: is the same instance as shop.txt; leave one out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("never")
def test_bad_input(cli: Cli, words: tuple[str, ...], message: str) -> None:
    """One sentence before anything is run, and no results file."""
    Path("bad.txt").write_text("2 2\n0 1")
    Path("sub").mkdir()
    Path("sub/shop.txt").write_text(SHOP.replace("0 3 1", "0 9 1"))
    Path("same.txt").write_text(SHOP)
    assert cli.refused(*BENCH, *words).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"instance,solver\nft06,tabu\n", "is no results file of this version"),
        (
            ",".join(COLUMNS).encode() + b"\n" + ",".join("x" * len(COLUMNS)).encode() + b"\n",
            "r.csv:2: operations: expected a number, got 'x'",
        ),
    ],
)
@pytest.mark.usefixtures("never")
def test_foreign_results_are_refused(cli: Cli, content: bytes, message: str) -> None:
    """And left as they are."""
    Path("r.csv").write_bytes(content)
    assert message in cli.refused(*BENCH)
    assert Path("r.csv").read_bytes() == content


def test_interrupt_keeps_what_is_done(cli: Cli) -> None:
    """Ctrl-C: exit code 130, the finished row is there, no process stays behind."""
    assert cli("convert", "ta41", "hard.txt", "--lossy").code == 0
    words = ("bench", "shop.txt", "hard.txt", "--solvers", "cpsat", "--time", "300")
    process = start(*words, "-o", "r.csv")
    assert process.stderr is not None
    assert any(line.startswith("shop  cpsat  seed 0") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert "interrupted: 1 of 2 are done, the same command continues" in err
    assert [r.instance for r in Results("r.csv").rows] == ["shop"]


def test_interrupt_when_quiet(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is printed nevertheless."""

    def press(*_: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(run, "run_all", press)
    ran = cli(*BENCH, "--quiet")
    assert (ran.code, ran.out, ran.err.count("\n")) == (130, "", 1)
    assert ran.err.startswith("interrupted: 0 of 1 are done")


def test_a_process_ends_with_its_parent(cli: Cli) -> None:
    """Also if that was killed: the end of stdin is the end."""
    task = Task(load("ta21"), "cpsat", {}, 0, 1, 300.0)
    child = subprocess.Popen(run.COMMAND, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(pickle.dumps(task))
    child.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.stdin.close()
    assert child.wait(PATIENCE) == 1


# processes that misbehave


def task_of(time_limit: float = 1.0) -> Task:
    """A solve of the shop."""
    return Task(load("shop.txt"), "dispatch", {}, 0, 1, time_limit)


def answering(answer: str) -> list[str]:
    """A process that prints this."""
    return [sys.executable, "-c", f"print({answer!r})"]


WRONG = {
    "liar": (
        {"objective": 9, "schedule": "{}"},
        "the schedule is wrong: ",
    ),
    "error": ({"error": "InternalError: two proofs"}, "InternalError: two proofs"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers(cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An error in the row, nothing claimed, and the benchmark goes on."""
    answer, message = WRONG[kind]
    if isinstance(answer, dict):
        usual = {"status": "feasible", "lower_bound": 1, "schedule": None, "history": []}
        answer = json.dumps({**usual, **answer})
    monkeypatch.setattr(run, "COMMAND", answering(answer))
    (found,) = run_all([task_of()])
    assert found.error.startswith(message) and found.status == "error"
    assert found.objective is None and found.lower_bound is None


def test_values_and_bounds_are_checked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right schedule with a wrong value, a bound above it, a status that is not so."""
    import optsched

    best = optsched.solve(load("shop.txt").problem, "cpsat", time_limit=600)
    assert best.schedule is not None and best.schedule.sequences is not None
    right = {
        "status": "optimal", "objective": best.objective, "lower_bound": best.objective,
        "history": [], "schedule": document.write(best.schedule).decode(),
    }  # fmt: skip
    value = best.objective
    assert value is not None and best.schedule.start is not None
    early = best.schedule.with_orders(best.schedule.sequences, best.schedule.start * 0)
    other = optsched.solve(load("other.txt").problem, "dispatch").schedule
    assert other is not None
    for changes, message in [
        ({}, ""),
        ({"objective": value - 1}, f"the schedule is worth {value}, not {value - 1}"),
        ({"lower_bound": value + 1}, f"the bound {value + 1} is above the objective {value}"),
        ({"lower_bound": value - 1}, f"status optimal with objective {value} and bound"),
        ({"schedule": document.write(early).decode()}, "the schedule is wrong: "),
        ({"schedule": document.write(other).decode()}, "the schedule is wrong: "),
    ]:
        monkeypatch.setattr(run, "COMMAND", answering(json.dumps({**right, **changes})))
        (found,) = run_all([task_of()])
        assert found.error.startswith(message) and bool(found.error) == bool(message)


def test_crash_and_hang(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of stderr; a process that goes on behind its limit is killed."""
    code = "import sys; print('bang', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(run, "COMMAND", [sys.executable, "-c", code])
    (found,) = run_all([task_of()])
    assert found.error == "the process ended with code 3: bang"
    monkeypatch.setattr(run, "COMMAND", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(run, "GRACE", 0.5)
    (found,) = run_all([task_of(0.1)])
    assert "did not stop" in found.error


def test_failed_solves_are_run_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 and the error in the table; the next time they count as not done."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "COMMAND", answering("hello"))
        ran = cli(*BENCH)
        assert ran.code == 1 and "the process ended with code 0" in " ".join(ran.out.split())
    ran = cli(*BENCH)
    assert ran.code == 0 and len(Results("r.csv").rows) == 2


# the results file


def test_rows_survive_the_file(tmp_path: Path) -> None:
    """Whatever is in a name; None stays None."""
    path = tmp_path / "r.csv"
    rows = [
        row(),
        row('a "quoted", name', objective=None, status="unknown"),
        row("ü", history='[[0.1,null,3],[0.25,55,50]]', time_limit=None, iterations=10**12),
    ]  # fmt: skip
    for one in rows:
        Results(path).append(one)
    assert Results(path).rows == rows
    assert Results(path).rows[2].steps == [(0.1, None, 3), (0.25, 55, 50)]
    Results(path).append(row("two\nlines"))
    assert Results(path).rows[3].instance == "two lines"


@pytest.mark.parametrize(
    "torn",
    [
        "ft06,ft,6x",
        '"unfinished',
    ],
)
def test_a_torn_line_is_dropped(tmp_path: Path, torn: str) -> None:
    """What a machine without power left behind does not spoil the rest."""
    path = tmp_path / "r.csv"
    Results(path).append(row())
    whole = path.read_text()
    path.write_text(whole + torn)
    results = Results(path)
    assert results.rows == [row()] and path.read_text() == whole + torn
    results.append(row("ft10"))
    assert [r.instance for r in Results(path).rows] == ["ft06", "ft10"]


@pytest.mark.parametrize("options", ["1", "[]", "[" * 99_999 + "]" * 99_999])
def test_options_are_objects(tmp_path: Path, options: str) -> None:
    """Other JSON is refused at reading."""
    Results(tmp_path / "r.csv").append(row(options=options))
    with pytest.raises(InputError, match=r"r.csv:2: options: expected a JSON object"):
        Results(tmp_path / "r.csv")


def test_keys() -> None:
    """The same experiment: instance by content, solver, options, seed, limits, version."""
    key = row().key
    assert row("another name", sha256="hash of ft06").key == key
    assert row(objective=1, wall_seconds=3.0, machine="x", error="y").key == key
    others: list[dict[str, Any]] = [
        {"sha256": "x"}, {"solver": "x"}, {"options": '{"a":1}'}, {"seed": 1},
        {"workers": 1}, {"time_limit": 1.0}, {"iterations": 3}, {"version": "2"},
    ]  # fmt: skip
    for changes in others:
        assert row(**changes).key != key
    assert row(iterations=1_234_560).key != row(iterations=1_234_561).key
    assert row(time_limit=10).key == row(time_limit=10.0).key != row(time_limit=10.0001).key


# known bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,bound\n", ':1: column "value" is missing; needed: name,bound,value'),
        ("instance,lb\n", ':1: column "ub" is missing; needed: instance,lb,ub'),
        ("instance,lb,ub\na,1,x\n", ":2: ub: expected an integer, got 'x'"),
        ("instance,lb,ub\na,3,2\n", ":2: lb: 3 is above ub 2"),
        ("instance,lb,ub\na,1,2\na,1,2\n", ":3: 'a' comes twice"),
    ],
)
def test_bad_bounds(tmp_path: Path, text: str, message: str) -> None:
    """Place, rule and value."""
    path = tmp_path / "b.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_bounds(path)
    assert message in str(caught.value)


def test_tables_of_best_known_values() -> None:
    """The shipped tables are read: values, bounds, families, also negative ones."""
    folder = Path(__file__).parents[2] / "instances"
    found = read_bounds(folder / "jobarray" / "best-known.csv")
    assert found["vgg19-1000x4"].family == "many" and found["ExplPipe"][:2] == (4983, 4983)
    assert read_bounds(folder / "quota" / "best-known.csv")["sum-20"].upper == -103_947_736


def test_columns_that_are_not_needed(tmp_path: Path) -> None:
    """They do not decide which columns have the bounds."""
    path = tmp_path / "known.csv"
    path.write_text("instance,lb,ub,first value\na,1,2,9\n")
    assert read_bounds(path)["a"][:2] == (1, 2)


def test_gaps_to_best_known_values(cli: Cli) -> None:
    """The family is that of the table; a better value has a negative gap and is named."""
    Path("t.csv").write_text("name,family,value,bound\nshop,fam,100,1\n")
    ran = cli(*BENCH, "--best-known", "t.csv")
    text = " ".join(ran.out.split())
    assert ran.code == 0 and "fam" in text and "better than best known: shop" in text
    assert "100 │ -" in text and "no known bounds" not in text
    Path("t.csv").write_text("instance,lb,ub\nshop,,100\n")  # a row without both bounds
    text = " ".join(cli(*BENCH, "--best-known", "t.csv").out.split())
    assert "no known bounds, gaps to the best of these runs: shop" in text


# the summary


def test_medians_and_means() -> None:
    """Seeds: median. Instances: mean. Without a schedule a gap is infinite."""
    rows = [
        row(objective=100 + k, seed=k, status="optimal" if k == 0 else "feasible", lower_bound=100)
        for k in (0, 1, 8)
    ]
    none: dict[str, Any] = {"objective": None, "time_to_best": None, "status": "unknown"}
    rows += [row("ft10", seed=k, **none) for k in (0, 1)]
    rows += [row("ft10", objective=120, seed=2)]
    found = summarise(rows, {"ft06": Known(100, 100), "ft10": Known(100, 100)})
    first, second = found.cells
    assert (first.runs, first.proved, first.gap) == (3, 1, pytest.approx(0.01))
    assert second.gap is None and second.bound_gap == 0.5
    (mean,) = found.means
    assert (mean.family, mean.instances, mean.solved, mean.proved, mean.runs) == (ALL, 2, 1, 1, 6)
    assert mean.gap == pytest.approx(0.01) and mean.worst_gap == pytest.approx(0.01)
    assert not found.contradictions
    late = summarise([row(objective=3), row(solver="cpsat", objective=0)])  # maximum lateness
    assert [mean.solved for mean in late.means] == [1, 1]


def test_contradictions_between_solvers() -> None:
    """A bound above another's schedule is named, with both."""
    found = summarise([row(objective=55), row(solver="cpsat", objective=None, lower_bound=56)])
    assert found.contradictions == ["ft06: cpsat proved 56, but tabu has a schedule of 55"]
    found = summarise([row(objective=55, lower_bound=54)], {"ft06": Known(40, 50)})
    assert found.contradictions == ["ft06: tabu proved 54, but 50 is known to be possible"]


def test_primal_integral() -> None:
    """1 before the first schedule, then (z - z*) / z, until the horizon."""
    found = [(2.0, 200), (6.0, 100)]
    assert primal_integral(found, 100, 10.0) == pytest.approx((2 + 4 * 0.5) / 10)
    assert primal_integral(found, 50, 10.0) == pytest.approx((2 + 4 * 0.75 + 4 * 0.5) / 10)
    assert primal_integral(found, 100, 4.0) == pytest.approx((2 + 2 * 0.5) / 4)
    assert primal_integral(found, 300, 10.0) == pytest.approx(0.2)  # better than the best known
    assert (primal_integral([], 100, 3.0), primal_integral([(0.0, 0)], 0, 3.0)) == (1.0, 0.0)
