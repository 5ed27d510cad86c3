"""All that the documentation shows is run; links, anchors and sizes of its pages are checked."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from program import Cli

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

SLOW: dict[str, str] = {
    "orders/compare-solvers.md": "every solve of a benchmark is a process",
    "clusters/ddp-loop.md": "trains; tests/elastic/test_sampling.py runs it on two ranks",
    "clusters/elastic-pool.md": "trains seven jobs in worker processes",
    "clusters/several-machines.md": "starts processes of joblib and a dask cluster",
    "clusters/plan-arrays.md": "trains two arrays, one process per worker",
    "clusters/serving.md": "starts processes with torch",
}
"""Pages whose code takes more than 5 s, and why it cannot be smaller: ``orders/proof.md``."""

PRINTED = {
    f"clusters/{name}.md" for name in (
        "place-a-job", "import-topology", "import-state", "measure-bandwidths", "make-room",
        "decide-in-a-loop", "plan-starts", "run-service", "contention",
    )
} | {
    f"training/{name}.md" for name in (
        "batches", "cut-a-model", "lora", "memory", "profile", "pytorch-pipelining", "report",
        "siblings", "stop-and-resume", "sweep", "why-it-cannot-hang",
    )
} | {
    f"orders/{name}.md" for name in (
        "job-arrays", "pytorch-orders", "rolling", "verify",
    )
}  # fmt: skip
"""Pages whose commands, and Python above a block of text, print what is shown."""

WORDS, WORDS_OF_A_PAGE = 30_000, 1_000
"""Most words of all pages and of one, without blocks of code."""

PAGES = [
    "README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in DOCS.rglob("*.md")
        if not {"generated", "gallery"} & {*path.parts}  # made by the build
    ),
]


class Block(NamedTuple):
    """One fenced block: its language, its text, and the name of the file that it is."""

    language: str
    text: str
    file: str | None
    below: bool = False
    """Whether nothing is between this block and the one above."""


FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# (\w+\.(?:py|toml))\n")
ANNOUNCED = re.compile(r"`([\w.-]+\.(?:json|csv|toml|yaml|txt))`:\n\s*\Z")
"""A file of data stands below a line that ends in its name: ``Save as `jobs.json`:``."""


@cache
def blocks(page: str) -> list[Block]:
    """Fenced blocks in the order of the page, also those of lists."""
    text, found, end = (ROOT / page).read_text(), list[Block](), 0
    for match in FENCE.finditer(text):
        indent, _, language, body = match.groups()
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE) if indent else body
        language = language.strip()
        file = None
        if language in ("python", "toml"):
            file = named[1] if (named := NAMED.match(body)) else None
        if language in ("json", "csv", "toml", "yaml", "text") and file is None:
            named = ANNOUNCED.search(text[max(0, match.start() - 300) : match.start()])
            file = named[1] if named else None
        found.append(Block(language, body, file, not text[end : match.start()].strip()))
        end = match.end()
    return found


def commands(block: Block) -> list[str]:
    """Commands of a console block that begin with ``$ optsched``."""
    text = block.text.replace("\\\n", " ")
    return [line[2:] for line in text.splitlines() if line.startswith("$ optsched ")]


def runs(page: str) -> bool:
    """Whether a page has code to run."""
    return any(one.language == "python" or commands(one) for one in blocks(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder that has the instances."""
    shutil.copytree(ROOT / "instances", tmp_path / "instances", copy_function=os.symlink)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # files of blocks can be imported
    monkeypatch.setattr("optsched.bench.run.missing_kernels", lambda tasks: [])
    gc.freeze()  # training collects garbage: what is imported need not be looked at
    return tmp_path


def run_python(block: Block, page: str, namespace: dict[str, object]) -> None:
    """Run a block with less time to solve than is shown."""
    text = block.text.replace("time_limit=5", "time_limit=3")
    exec(compile(text, page, "exec"), namespace)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a service with live clusters, in place of ``http://127.0.0.1:8765``."""
    from benchmarks.service.server import service

    folder = tmp_path_factory.mktemp("live")
    with service("--workers", "1", "--state", str(folder)) as running:
        yield f"http://127.0.0.1:{running.port}"


ADDRESS = "http://127.0.0.1:8765"


def shown(block: Block) -> dict[str, str]:
    """Text below each command."""
    parts = re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return {line: text for line, _, text in (part.partition("\n") for part in parts)}


def run_shell(block: Block, variables: list[str], printed: bool) -> None:
    """Run ``$ curl ...``, with the variables of ``$ NAME=...``, and compare the answers."""
    for command, text in shown(block).items():
        if re.match(r"[A-Z]+=", command):
            variables.append(command)
        elif command.startswith("curl "):
            if shutil.which("curl") is None:
                pytest.skip("no curl")
            script = "\n".join(["set -e", *variables, command.replace("curl", "curl -sS", 1)])
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            if printed and text:
                assert json.loads(done.stdout) == json.loads(text), command


def run_commands(block: Block, cli: Cli, printed: bool = False) -> None:
    """Run the commands of a block, with less time to solve; ``< FILE`` and ``> FILE`` work."""
    for command in commands(block):
        words = shlex.split(command.replace("--time 5", "--time 1"), comments=True)[1:]
        output = Path(words.pop(k + 1)) if (k := _pop(words, ">")) >= 0 else None
        if (k := _pop(words, "<")) >= 0:
            cli.feed(Path(words.pop(k + 1)).read_text())
        done = cli(*words)
        assert done.code == 0, (command, done.err)
        if output:
            output.write_text(done.out)
        if printed and (text := shown(block)[command]):
            assert done.out == text, command


def _pop(words: list[str], sign: str) -> int:
    """Remove a sign and return the index before the word that follows it, -1 without it."""
    if sign not in words:
        return -1
    words.pop(k := words.index(sign))
    return k - 1


def params(pages: list[str], slow: Any) -> list[Any]:
    """Pages as parameters, the slow ones marked."""
    marks = {
        page: [pytest.mark.slow] if page.removeprefix("docs/") in slow else [] for page in pages
    }
    return [pytest.param(page, marks=mark) for page, mark in marks.items()]


@pytest.mark.parametrize("page", params([page for page in PAGES if runs(page)], SLOW))
def test_page_runs(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Files are there from the start; Python and commands run in the order of the page."""
    printed, found, variables = page.removeprefix("docs/") in PRINTED, blocks(page), list[str]()
    if any("Client()" in one.text or f"{ADDRESS}/v1" in one.text for one in found):
        url = request.getfixturevalue("served")
        texts = [one.text.replace("Client()", f"Client({url!r})") for one in found]
        found = [one._replace(text=text.replace(ADDRESS, url))
                 for one, text in zip(found, texts, strict=True)]  # fmt: skip
    for block in found:
        if block.file:
            Path(block.file).write_text(block.text)
    cli = Cli(folder, monkeypatch, capsys)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for above, block in zip([None, *found], found, strict=False):
        if block.language == "python":
            capsys.readouterr()
            run_python(block, page, namespace)
        elif block.language == "console":
            run_commands(block, cli, printed)
            run_shell(block, variables, printed)
        elif block.below and printed and above and above.language == "python":
            assert capsys.readouterr().out == block.text


def test_tables_name_pages() -> None:
    """Slow pages have code, and printed ones an output to compare."""
    assert {page for page in SLOW if not runs(f"docs/{page}")} == set()
    for page in PRINTED:
        found = blocks(f"docs/{page}")
        outputs = [any(shown(one).values()) for one in found if one.language == "console"]
        outputs += [b.below and a.language == "python" != b.language for a, b in pairwise(found)]
        assert any(outputs), page


def prose(page: str | Path) -> str:
    """Text of a page without fenced blocks."""
    return FENCE.sub("", (ROOT / page).read_text())


def test_pages_are_short() -> None:
    """Words without blocks of code."""
    words = {page: len(prose(page).split()) for page in PAGES if page != "README.md"}
    assert {page: n for page, n in words.items() if n > WORDS_OF_A_PAGE} == {}
    assert sum(words.values()) <= WORDS, words


@cache
def anchors(path: Path) -> set[str]:
    """Anchors of a page: headings as GitHub and MyST name them, and ``(label)=`` lines."""
    text = FENCE.sub("", path.read_text())
    found: set[str] = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for title in re.findall(r"^#{1,4} +(.+?) *$", text, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def generated(path: Path) -> bool:
    """Whether the build adds parts to a page, which may have the anchor: Sphinx checks it."""
    return "```{include}" in path.read_text()


LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Relative links of a page, and anchors of pages in Markdown."""
    wrong = []
    for target in LINK.findall(prose(page)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (
            anchor and path.suffix == ".md" and not generated(path) and anchor not in anchors(path)
        ):
            wrong.append(target)
    assert not wrong


def test_the_reference_has_every_document() -> None:
    """Formats in the code are headings of the page, and the other way round."""
    sources = [*(ROOT / "optsched").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]
    found = {name for path in sources for name in FORMAT.findall(path.read_text())}
    text = (DOCS / "reference" / "documents.md").read_text()
    assert set(re.findall(r"^### (\S+)$", text, re.MULTILINE)) == found


FORMAT = re.compile(r"\boptsched\.[a-z-]+/\d\b")
