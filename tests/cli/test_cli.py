"""The command line: exit codes, one line on stderr, and no half results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program import BAD, Cli
from rolling_arrays import equal_jobs

import optsched
from optsched.arraypipe.profile import Profile
from optsched.formats.read_problem import read_problem
from optsched.model.schedule import Schedule
from optsched.solving.solver import solver as find_solver
from optsched.solving.solver import support_by_name

# what every command does with bad input

READERS = ("solve", "verify", "show")


@pytest.mark.parametrize("command", READERS)
def test_bad_files(cli: Cli, command: str) -> None:
    """Exit code 2, one printable line that begins with the file, no output file."""
    for name, content in BAD.items():
        path = Path(f"{name}.json")
        if content is not None:
            path.write_bytes(content)
        line = cli.refused(command, path)
        assert line.startswith(f"{path}:") and line.isprintable()
    assert cli.refused(command, ".") == ".: is a directory, expected a file"
    assert "File name too long" in cli.refused(command, "x" * 300)


@pytest.mark.parametrize("command", ["solve", "convert", "arraypipe problem"])
def test_profiles_are_no_instances(cli: Cli, command: str) -> None:
    """The refusal names the commands for it; `arraypipe problem` writes what the others read."""
    known = Path(__file__).parents[2] / "instances" / "profiles" / "gpt2_xl-4.profile.json"
    Path("x.profile.json").write_bytes(known.read_bytes())
    words = [*command.split(), "x.profile.json", *["y.jobarray.json"] * (command == "convert")]
    if command == "arraypipe problem":
        ran = cli(*words)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out == "wrote x.jobarray.json: 4 jobs, 4 stages on 4 devices\n"
        assert read_problem("x.jobarray.json") == Profile.read("x.profile.json").problem()
        return
    line = cli.refused(*words)
    assert line.startswith("x.profile.json: a profile holds measured times, it is no instance")
    for way in ("`optsched arraypipe problem`", "`optsched arraypipe run`", "Profile.read"):
        assert way in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("solv", "No such command 'solv'. Did you mean 'solve'? (see `optsched --help`)"),
        ("gpus choise", "(see `optsched gpus --help`)"),
        ("solve", "Missing argument 'file' (see `optsched solve --help`)"),
        ("show a b", "unexpected extra argument"),
        ("solve x --out y", "No such option: --out"),
        ("solve x --time soon", "'--time': Input should be a valid number"),
        ("solve x --time soon", ", got 'soon' (see `optsched solve --help`)"),
        ("solve x -o", "Option '-o' requires an argument"),
        ("dispatch --gpus 8", "dispatch: now `optsched gpus choose`"),
    ],
)
def test_bad_usage(cli: Cli, words: str, line: str) -> None:
    """One line, with the command whose help says more."""
    assert line in cli.refused(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        ("solve", "shop.txt", "-o"),
        ("show", "plan.json", "-o"),
        ("generate", "jobarray", "-o"),
        ("convert", "shop.txt"),
    ],
    ids=" ".join,
)
def test_outputs_that_cannot_be(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    """A folder that is not there, a folder instead of a file, a name too long: before any work."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("work was done for an output that cannot be written")

    monkeypatch.setattr("optsched.solve", never)
    monkeypatch.setattr("optsched.pipelines.generator.job_array", never)
    monkeypatch.setattr("optsched.problems.jobshop.generator.generate", never)
    Path("folder.png").mkdir()
    assert "there is no folder no" in cli.refused(*words, "no/x.png")
    assert "is a directory" in cli.refused(*words, "folder.png")
    assert "File name too long" in cli.refused(*words, "x" * 300 + ".png")


def test_existing_output_survives_failures(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """When reading, solving or writing fails, the old output file is as it was."""
    Path("old.json").write_text("old")
    Path("bad.txt").write_text("2 2\n0 1")
    cli.refused("solve", "bad.txt", "-o", "old.json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("optsched.io.files.os.replace", full)
        line = cli.refused("solve", "shop.txt", "--solver", "dispatch", "-o", "old.json")
        assert line == "old.json: cannot be written (No space left on device)"
    assert Path("old.json").read_text() == "old"


# solve


def test_solve_prints_and_writes(cli: Cli) -> None:
    """The value, the bound and the status; the written schedule is verified."""
    ran = cli("solve", "shop.txt", "-o", "out.json")
    assert ran.code == 0
    told = ran.err.splitlines()  # of a slow search, and of kernels that are compiled first
    assert all("  objective " in line or line.startswith("compiling ") for line in told)
    lines = dict(line.split(None, 1) for line in ran.out.splitlines() if "bound" not in line)
    assert lines["status"] == "optimal"
    assert lines["makespan"] == f"{Schedule.read('out.json').makespan}"
    assert lines["written"] == "out.json"
    assert optsched.verify(Schedule.read("out.json")) == []


def test_solve_json(cli: Cli) -> None:
    """One object with exactly these members, its history in order of time."""
    ran = cli("solve", "shop.txt", "--json", "--seed", "3")
    assert ran.code == 0 and ran.out.count("\n") == 1
    found = json.loads(ran.out)
    assert list(found) == [
        "instance", "solver", "objective", "lower_bound", "gap", "status", "seconds", "history",
    ]  # fmt: skip
    assert (found["instance"], found["solver"], found["status"]) == ("shop", "auto", "optimal")
    assert found["objective"] == found["lower_bound"] and found["gap"] == 0
    steps = found["history"]
    assert [s["seconds"] for s in steps] == sorted(s["seconds"] for s in steps)
    assert steps[-1]["objective"] == found["objective"]
    assert set(steps[0]) == {"seconds", "objective", "lower_bound", "event", "source"}


def test_solve_stops(cli: Cli) -> None:
    """At a target, a gap, or when nothing better comes; iterations repeat exactly."""

    def solved(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(cli("solve", *words, "--json").out)
        return found

    found = solved("shop.txt", "--target", "1000")
    assert found["objective"] <= 1000
    assert sum(step["event"] == "incumbent" for step in found["history"]) == 1
    counted = ("shop.txt", "--iterations", "3", "--seed", "5")
    assert solved(*counted)["objective"] == solved(*counted)["objective"]
    assert cli("generate", "taillard", "--jobs", "15", "-o", "hard.txt").code == 0
    found = solved("hard.txt", "--stop-gap", "9")
    assert found["status"] == "feasible" and found["gap"] <= 9


def test_solve_options(cli: Cli) -> None:
    """Values are JSON if they can be, else text; unknown ones are refused."""
    words = ("solve", "shop.txt", "--solver", "dispatch", "-o", "out.json")
    assert cli(*words, "--option", 'rules=["mwkr"]', "--option", "search=false").code == 0
    options = Schedule.read("out.json").provenance["options"]
    assert options == {"rules": ["mwkr"], "search": False}
    line = cli.refused(*words, "--option", "rules=mwkr")
    assert line.startswith("options.rules: expected a list of")
    assert "got 5" in cli.refused(*words, "--option", "rules=5")
    assert "dispatch has no option 'depth'" in cli.refused(*words, "--option", "depth=NaN")
    assert cli.refused(*words, "--option", "depth") == "option: expected KEY=VALUE, got 'depth'"
    assert cli.refused(*words, "--option", "=3") == "option: expected KEY=VALUE, got '=3'"


def test_solve_warm_start(cli: Cli) -> None:
    """The warm start is the first incumbent; one of another instance is refused."""
    ran = cli("solve", "shop.txt", "--json", "--warm-start", "plan.json", "--time", "0")
    found = json.loads(ran.out)
    assert found["objective"] == Schedule.read("plan.json").makespan
    assert found["history"][0]["source"] == "warm start"
    assert cli.refused("solve", "shop.txt", "--warm-start", "graph.json").startswith("warm_start:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--time", "nan"), "time_limit: expected seconds >= 0, got nan"),
        (("--solver", "cp-sat"), "solver: there is no 'cp-sat' (did you mean cpsat?); installed:"),
        (("--stop-gap", "-1"), "Gap: relative: expected a finite number >= 0, got -1.0"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_hostile_limits(cli: Cli, words: tuple[str, ...], message: str) -> None:
    """Limits out of range are refused with the range."""
    assert cli.refused("solve", "shop.txt", *words, "-o", "out.json").startswith(message)


@pytest.mark.parametrize(
    ("words", "empty"),
    [(("solve", "-o", "out.json"), {"status": "infeasible", "objective": None}),
     (("show",), {"lower_bound": None, "bounds": {}})],
)  # fmt: skip
def test_infeasible(cli: Cli, words: tuple[str, ...], empty: dict[str, Any]) -> None:
    """Exit code 1, the reason, and no output file."""
    optsched.JobShop([[(0, 3), (1, 4)]], deadline=[6]).write("late.json")
    ran = cli(*words, "late.json")
    assert ran.code == 1 and "infeasible" in ran.out
    assert "job 0 needs 7 for its chain, but its deadline is 6" in ran.out
    found = json.loads(cli(*words, "late.json", "--json").out)
    assert found.items() >= empty.items() and "deadline" in found["reason"]
    if words[0] == "solve":
        quiet = cli(*words, "late.json", "--quiet")
        assert (quiet.code, quiet.out) == (1, "")
        assert quiet.err.startswith("infeasible: job 0 needs 7 for its chain")
    assert not Path("out.json").exists()


def test_unsupported(cli: Cli) -> None:
    """A solver that does not take the problem: exit code 2; `show FILE` lists it apart."""
    array = optsched.JobArray([[1, 1]], [[1, 1]], objective="period")
    array.write("rolling.json")
    line = cli.refused("solve", "rolling.json", "--solver", "branch_and_bound", "-o", "out.json")
    assert line.startswith("branch_and_bound does not solve this problem")
    lines = cli("show", "rolling.json").out.splitlines()
    problem = read_problem("rolling.json")
    takers = [name for name in optsched.solvers("periodic") if support_by_name(name, problem)]
    assert takers and f"solvers           {', '.join(takers)}" in lines
    refusals = {line.partition("  ")[0] for line in lines if line.startswith("not ")}
    assert refusals == {f"not {name}" for name in {*optsched.solvers("periodic")} - {*takers}}


def test_an_exception_inside_a_solver(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 and one sentence with the solver, the exception and its line; no file."""

    def broken(*_: object) -> None:
        raise KeyError("tenure")

    monkeypatch.setattr(type(find_solver("dispatch")), "solve", broken)
    ran = cli("solve", "ft06", "--solver", "dispatch", "-o", "out.json")
    assert (ran.code, ran.out) == (1, "") and not Path("out.json").exists()
    assert ran.err.startswith("failed: solver dispatch: KeyError: 'tenure' (")
    assert f"test_cli.py:{broken.__code__.co_firstlineno + 1})" in ran.err
    monkeypatch.setattr(type(find_solver("dispatch")), "supports", broken)
    assert "supports() raises KeyError: 'tenure'" in cli("show", "ft06").out


@pytest.mark.parametrize("name", ["la01"])
def test_names_of_published_shops(cli: Cli, name: str) -> None:
    """Every command that takes an instance takes a name; those of schedules say what to do."""
    assert f"instance    {name}" in cli("solve", name, "--solver", "dispatch", "-o", "x.json").out
    assert cli("verify", "x.json", "--problem", name).code == 0
    assert "cpsat" in cli("show", name).out
    assert cli("convert", name, f"{name}.jobshop.json").code == 0
    assert optsched.JobShop.read(f"{name}.jobshop.json") == optsched.JobShop.read(name)
    for words in (("verify", name), ("show", name, "-o", "x.png")):
        assert f"optsched solve {name} -o" in cli.refused(*words)
    Path(name).write_text("1 1\n0 7\n")
    assert optsched.JobShop.read(name).n_jobs == 1  # a file goes before the name


def test_names_cannot_talk_to_the_terminal(cli: Cli) -> None:
    """Control characters in names are not sent, and markup is text."""
    shop = optsched.JobShop([[(0, 1)]], ["[/m]\x1b[2J"], name="[red]\x1b[2Jx\ny")
    shop.write("named.json")
    ran = cli("solve", "named.json", "-o", "named.schedule.json")
    assert ran.code == 0 and "\x1b" not in ran.out and "[red]" in ran.out
    for command in ("verify", "show"):
        ran = cli(command, "named.schedule.json")
        assert ran.code == 0 and "\x1b" not in ran.out


# the other commands


def test_verify(cli: Cli) -> None:
    """Of one file every violation; of several a line each as for one alone; the worst decides."""
    tree = json.loads(Path("plan.json").read_text())
    Path("wrong.json").write_text(json.dumps({**tree, "starts": [0] * 9}))
    alone = {name: cli("verify", name) for name in ("plan.json", "wrong.json", "nowhere.json")}
    assert [ran.code for ran in alone.values()] == [0, 1, 2]
    assert alone["plan.json"].out.startswith("plan.json: consistent, 9 operations")
    lines = alone["wrong.json"].out.splitlines()
    count = len(optsched.verify(Schedule.read("wrong.json")))
    assert lines[-1] == f"wrong.json: not consistent, {count} violations"
    assert len(lines) == count + 1 and count > 5
    ran = cli("verify", "--json", *alone)
    right, wrong, missing = json.loads(ran.out)["files"]
    assert ran.code == 2 and right["violations"] == [] and len(wrong["violations"]) == count
    assert wrong["violations"][0]["kind"] in lines[0] and "no such file" in missing["error"]
    last = [line for ran in alone.values() for line in ran.out.splitlines()[-1:]]
    for order, code in (
        (["plan.json", "plan.json"], 0),
        (["wrong.json", "plan.json"], 1),
        (["wrong.json", "nowhere.json", "plan.json"], 2),
        (["nowhere.json", "graph.json"], 2),
    ):
        ran = cli("verify", *order)
        assert ran.code == code
        told = [line for name in order for line in last if line.startswith(f"{name}:")]
        assert ran.out.splitlines() == told
        assert ran.err.count("\n") == len(order) - len(told)
        assert all(line.startswith("error: ") for line in ran.err.splitlines())


def test_drawings(cli: Cli) -> None:
    """The ending selects picture, page or trace; others are refused."""
    pytest.importorskip("matplotlib")
    for name in ("plan.png", "x.html", "plan.perfetto.json"):
        assert cli("show", "plan.json", "-o", name).out == f"wrote {name}\n"
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("plan.perfetto.json").read_text())["traceEvents"]
    assert "expected a file ending in" in cli.refused("show", "plan.json", "-o", "x.exe")


def test_no_output_replaces_the_input_or_another(cli: Cli) -> None:
    """One sentence instead, and the file is still there, whatever it is called."""
    Path("plan.png").write_bytes(Path("plan.json").read_bytes())
    Path("link.txt").symlink_to("shop.txt")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    for words in (
        ("show", "plan.json", "-o", "plan.json"), ("show", "plan.png", "-o", "plan.png"),
        *(("solve", "shop.txt", "-o", output) for output in ("shop.txt", "./shop.txt", "link.txt")),
        *(("convert", "shop.txt", output) for output in ("shop.txt", "./shop.txt", "link.txt")),
    ):  # fmt: skip
        assert "is the file that is read; choose another name" in cli.refused(*words)
    words = ("generate", "cluster", "-o", "x.json", "--state", "x.json")
    assert cli.refused(*words) == "x.json: is the name of two outputs; choose another one"
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


@pytest.mark.parametrize("output", ["x.png", "x.html", "x.json"])
def test_cycles(cli: Cli, output: str) -> None:
    """Only a periodic schedule has some, from 1 to 100: else one sentence and no file."""
    line = cli.refused("show", "plan.json", "--cycles", "2", "-o", output)
    assert line == "cycles: only to draw a schedule with a period, with -o"
    equal_jobs(3, 2).write("rolling.json")
    for cycles in ("0", "-1", "101", "1000000000", "9" * 30):
        line = cli.refused("show", "rolling.json", "--cycles", cycles, "-o", output)
        assert line == f"cycles: expected 1..100, got {cycles}"
    assert cli("show", "rolling.json", "-o", output, "--cycles", "2").code == 0


def test_show(cli: Cli) -> None:
    """Objective, devices and critical path; what repeats for ever is told per cycle."""
    ran = cli("show", "plan.json")
    assert ran.code == 0 and "critical path" in ran.out
    assert f"makespan {Schedule.read('plan.json').makespan}" in ran.out
    equal_jobs(3, 2).write("rolling.json")
    out = cli("show", "rolling.json").out
    assert "period 9 µs" in out and "3 iterations a cycle" in out and "critical cycle" in out
    assert "period 9 us (instance not given" in cli("verify", "rolling.json").out


def test_generate(cli: Cli) -> None:
    """The same seed gives the same bytes; what is written can be solved."""
    words = ("generate", "jobarray", "--stages", "2", "--jobs", "4", "--seed", "1", "-o")
    for name in ("a.json", "b.json"):
        assert "4 jobs, 2 stages on 2 devices" in cli(*words, name).out
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    assert cli("generate", "taillard", "--jobs", "3", "--machines", "2", "-o", "t.txt").code == 0
    assert cli("solve", "t.txt", "--quiet").code == cli("solve", "a.json", "--quiet").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("jobarray", "--stages", "51"),
            "stages: expected an integer in 1..50, got 51; each holds a layer of gpt2_xl",
        ),
        (("cluster", "--state", "out.json"), "out.json: is the name of two outputs"),
        (
            ("jobarray", "--jobs", "100000", "--stages", "40"),
            "jobs x micro-batches x stages: expected at most 2000000, got 4000000",
        ),
        (("jobarray", "--memory", "abc"), 'memory: expected bytes or a size such as "80GB"'),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_generate_refuses(cli: Cli, words: tuple[str, ...], message: str) -> None:
    """One sentence with the argument, its value and the legal range."""
    assert cli.refused("generate", *words, "-o", "out.json").startswith(message)


# bound


def test_bound(cli: Cli) -> None:
    """Every bound by name, the best at the end."""
    lines = dict(line.rsplit(None, 1) for line in cli("show", "shop.txt").out.splitlines()[3:-1])
    assert {"chain", "load", "one_machine", "carlier", "lower bound"} <= set(lines)
    values = [int(value) for name, value in lines.items() if name != "lower bound"]
    best = json.loads(cli("solve", "shop.txt", "--json").out)["objective"]
    assert int(lines["lower bound"]) == max(values) <= best
    found = json.loads(cli("show", "shop.txt", "--json").out)
    assert list(found) == [
        "instance", "kind", "size", "bounds", "lower_bound", "seconds", "solvers"
    ]  # fmt: skip


# help


def test_every_help_has_an_example(cli: Cli) -> None:
    """One command line that begins with the command's own name."""
    from optsched.cli.app import COMMANDS, SECTIONS, command

    names = {path.split()[0] for path in COMMANDS}
    assert len(names) <= 14
    listed = [name for part in SECTIONS.values() for name in part]
    assert sorted(listed) == sorted(names), "the help lists each command in one section"
    for path in COMMANDS:
        text = " ".join((command(path).help or "").split())
        assert text.count(f"Example: optsched {path} ") == 1 or path == "warmup", path


def test_former_names(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused in one line by a name that exists."""
    from optsched.cli.app import COMMANDS, GROUPS, RENAMED
    from optsched.formats import read_problem

    for name, new in RENAMED.items():
        assert cli.refused(name, "x.json") == f"{name}: now `optsched {new}`"
        assert new.partition(" FILE")[0] in {*COMMANDS, *GROUPS, "--version"}
    for text in read_problem._COMMANDS.values():  # for documents that are no instances
        assert any(f"{text} ".startswith(f"{path} ") for path in COMMANDS)
    assert "Did you mean 'simulate'" in cli("cluster", "simulat").err
    assert cli("--version").out.strip() == optsched.__version__
    for name, value in [("", "complete_bash"), ("WORDS", "optsched gpus topology s"), ("CWORD", 3)]:
        monkeypatch.setenv(f"COMP_{name}" if name else "_OPTSCHED_COMPLETE", f"{value}")
    assert cli().out.split() == ["show", "state"]


def test_show_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per library, also for those that are not installed."""
    from importlib.metadata import version

    monkeypatch.setattr("optsched.version._LIBRARIES", ("numpy", "no-such-library"))
    optsched.show_versions()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["optsched"] == optsched.__version__ and lines["numpy"] == version("numpy")
    assert lines["no-such-library"] == "not installed"


# warmup


def test_warmup_knows_every_kernel(cli: Cli) -> None:
    """Modules with kernels are found by themselves; all their entries are on disk afterwards."""
    from optsched.kernels.background import all_entries, kernel_modules

    names = [name.removeprefix("optsched_solvers.") for name in kernel_modules()]
    assert {"optsched.kernels.longest_path", "optsched.kernels.list_schedule"} <= set(names)
    assert not {"optsched.kernels.compile", "shop.dispatch", "shop.auto"} & set(names)
    ran = cli("warmup")
    assert ran.code == 0
    entries, failed = all_entries()
    found = json.loads(cli("warmup", "--json").out)
    assert found["kernels"] == len(entries) and found["not_loaded"] == []
    assert ran.out.startswith(f"{len(entries)} kernels in ")
    assert all(one.stored for one in entries)
    assert not failed
