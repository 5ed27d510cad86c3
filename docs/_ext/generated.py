"""Parts that the build makes from the code: commands, documents, status codes, pictures."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from matplotlib.figure import Figure
from numpydoc.docscrape import NumpyDocString
from sphinx_gallery.scrapers import figure_rst
from typer.testing import CliRunner

from optsched.cli.app import COMMANDS, GROUPS, app
from optsched.service import schemas
from optsched.service.routes import _CODES

if TYPE_CHECKING:
    from sphinx.application import Sphinx

STRUCTS = {
    "elastic-run": ("optsched.elastic-run/1", "optsched.elastic.runner:_Saved"),
    "journal": ("optsched.journal/1", "optsched.service.live:First"),
    "profile": ("optsched.profile/2", "optsched.arraypipe.profile:Profile"),
    "routing": ("optsched.routing/1", "optsched.serving.scenario:_Scenario"),
    "routing-plan": ("optsched.routing-plan/1", "optsched.serving.plan:_Document"),
    "run": ("optsched.run/1", "optsched.arraypipe:Report", "report"),
    "serving-bench": ("optsched.serving-bench/1", "optsched.serving:Point", "points"),
    "serving-log": ("optsched.serving-log/1", "optsched.serving.log:_Document"),
}
"""Documents that the service does not describe, and the structs that read them or that they hold as
a member: in plural a list."""

MEANINGS = {
    "bandwidth": ("optsched.bandwidth:MeasurementTable", "optsched.bandwidth:Measurement"),
    "cluster": (
        "optsched.bandwidth:Cluster", "optsched.bandwidth:HostType", "optsched.bandwidth:Host",
    ),
    "decide": (
        "optsched.cluster.determined:Pool", "optsched.cluster.determined:State",
        "optsched.cluster.determined:Agent", "optsched.cluster.determined:Task",
        "optsched.cluster.determined:Group",
    ),
    "jobarray": ("optsched:JobArray",),
    "jobshop": ("optsched:JobShop",),
    "quota": ("optsched:QuotaPlan", "optsched:QuotaJob"),
    "run": ("optsched.arraypipe:Report",),
    "routing": ("optsched.serving:Scenario", "optsched.serving:Server", "optsched.serving:Link"),
    "serving-log": ("optsched.serving:Summary",),
    "schedule": ("optsched:Schedule", "optsched:Resource", "optsched:Goal", "optsched:Objective"),
    "snapshot": ("optsched.plan:ClusterSnapshot", "optsched.plan:PlanJob",
                 "optsched.plan:ArrayRequest"),
    "subset": ("optsched:GpuPlacement", "optsched.bandwidth:Policy"),
}  # fmt: skip
"""Classes whose docstrings say what the fields of a document mean."""


def write_all(folder: Path) -> None:
    """Write the parts as pages to be included, and a JSON Schema per document."""
    folder.mkdir(exist_ok=True)
    pages = {"cli": commands(), "status": status()}
    for name, schema in all_schemas().items():
        pages[f"document-{name}"] = fields(name, schema)
        text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        _write(folder / f"optsched.{name}.schema.json", text)
    for name, text in pages.items():
        _write(folder / f"{name}.md", text)


def figures(block: object, variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """Save new figures among the variables of an example, for its page."""
    paths = []
    for value in variables["example_globals"].values():
        if isinstance(value, Figure) and value not in _drawn:
            _drawn.append(value)
            paths.append(next(variables["image_path_iterator"]))
            value.savefig(paths[-1], dpi=110)
    return figure_rst(paths, settings["src_dir"])


_drawn: list[Figure] = []


def arguments(settings: dict[str, Any], variables: dict[str, Any]) -> list[str]:
    """Arguments of an example: less time, and results in the folder of the build."""
    source = Path(variables["src_file"])
    words = {
        "hf_finetune": ["{}"], "lora_siblings": ["--out", "{}"],
        "main_job": ["--time-limit", "2", "--out", "{}"],
        "sweep_gpt": ["--check", "--steps", "20", "--out", "{}"],
    }  # fmt: skip
    folder = Path("..", "out", "gallery", source.stem)  # from the folder in which it runs
    rmtree(source.parent / folder, ignore_errors=True)  # else a training is resumed
    return [word.format(folder) for word in words.get(source.stem, [])]


def _write(path: Path, text: str) -> None:
    """Leave a file that would not change: Sphinx reads changed files alone."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def commands() -> str:
    """Help texts of all commands, as the program prints them."""
    run, found, last = CliRunner(), [], ""
    for path in COMMANDS:
        first, *rest = path.split()
        if first != last:
            found.append(f"## {first}\n\n{GROUPS[first]}\n\n" if rest else f"## {first}\n\n")
            last = first
        heading = f"### {path}\n\n" if rest else ""
        done = run.invoke(
            app, [*path.split(), "--help"], prog_name="optsched", env={"COLUMNS": "96"}
        )
        if done.exit_code:
            raise RuntimeError(f"optsched {path} --help: {done.output}")
        found.append(f"{heading}```text\n{done.output.strip()}\n```\n\n")
    return "".join(found)


def outside_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Write links to folders and pages of the checkout outside of `docs` as text with the path."""
    here = (app.srcdir / page).parent

    def written(match: re.Match[str]) -> str:
        path = (here / match[2]).resolve()
        outside = path.is_relative_to(app.srcdir.parent) and not path.is_relative_to(app.srcdir)
        if outside and (path.is_dir() or path.suffix == ".md"):
            return f"{match[1]} (`{path.relative_to(app.srcdir.parent)}`)"
        return match[0]

    source[0] = re.sub(r"\[([^\]\n]*)\]\((\.\./[^)#\s]+)\)", written, source[0])


def status() -> str:
    """Codes of HTTP with their meanings."""
    rows = "".join(f"| {code} | {text} |\n" for code, text in _CODES.items())
    return f"| status | meaning |\n|---|---|\n{rows}"


def all_schemas() -> dict[str, Any]:
    """One JSON Schema per document, with the parts that it refers to."""
    found = {}
    for name in schemas.DOCUMENTS:
        found[name] = pruned(schemas.bundle(name))
    for name, (title, place, *members) in STRUCTS.items():
        module, _, key = place.partition(":")
        struct = getattr(import_module(module), key)
        for member in members:
            inner = list[struct] if member.endswith("s") else struct
            struct = msgspec.defstruct(key, [("format", Literal[title]), (member, inner)])
        schema = msgspec.json.schema(struct)
        top = schema["$ref"].rpartition("/")[2]
        schema["$defs"][top]["title"] = title
        text = json.dumps(schema).replace(f'#/$defs/{top}"', f'#/$defs/{name}"')
        schema = json.loads(text)
        schema["$defs"][name] = schema["$defs"].pop(top)
        found[name] = pruned(schema)
    return found


def pruned(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out definitions that the document does not reach."""
    reached, left = {}, [schema["$ref"].rpartition("/")[2]]
    while left:
        if (name := left.pop()) not in reached:
            reached[name] = schema["$defs"][name]
            left += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(reached[name]))
    return {**schema, "$defs": reached}


def fields(name: str, schema: dict[str, Any]) -> str:
    """Tables of the members of a document and of its parts."""
    meaning = meanings(name)
    known = {place.rpartition(":")[2].lower() for place in MEANINGS.get(name, ())}
    parts = {
        key: part
        for key, part in schema["$defs"].items()
        if key == name or name in STRUCTS or key.startswith(f"{name}.")  # others have own tables
    }
    title = parts[name]["title"]
    found = [f":::{{dropdown}} Fields of `{title}`\n\n"]
    for key, part in parts.items():
        short = key.rpartition(".")[2].lstrip("_")
        text = part.get("description", "").partition("\n\n")[0].replace("``", "`")
        text = " ".join(text.split()).rstrip(".")
        if key != name:
            found.append(f"Each `{short}`{f': {text}' * bool(text)}:\n\n")
        own = short.lower() if short.lower() in known else ""
        rows = [
            (f"`{field}`", kind(value), default(field, value, part), meaning.get((own, field), ""))
            for field, value in part.get("properties", {}).items()
        ]
        found.append(table("field type default meaning", rows) if rows else "")
    return "".join([*found, ":::\n\n", f"{{download}}`JSON Schema of {title} "
                    f"<generated/optsched.{name}.schema.json>`\n"])  # fmt: skip


def table(titles: str, rows: list[tuple[str, ...]]) -> str:
    """A table without its last column if that is empty."""
    columns = titles.split()
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def default(field: str, value: dict[str, Any], part: dict[str, Any]) -> str:
    """Default of a member; objects that may be left out have defaults of their own."""
    if field in part.get("required", []):
        return "required"
    return f"`{json.dumps(value['default'])}`" if "default" in value else ""


def kind(value: dict[str, Any]) -> str:
    """Type of a member, in a few words."""
    if ref := value.get("$ref"):
        return f"`{ref.rpartition('/')[2].rpartition('.')[2].lstrip('_')}`"
    if options := value.get("anyOf") or value.get("oneOf"):
        return " or ".join(dict.fromkeys(map(kind, options)))
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    given = value.get("type", "any")
    if given == "array":
        return f"list of {kind(value.get('items') or {})}"
    if given == "object" and isinstance(more := value.get("additionalProperties"), dict):
        return f"map to {kind(more)}"
    text = given if isinstance(given, str) else " or ".join(given)
    if (least := value.get("minimum")) is not None and least > -(2**50):
        text += f" >= {least}"
    return text


def meanings(name: str) -> dict[tuple[str, str], str]:
    """First sentences of the parameters of the classes that hold a document's values.

    Keys are (class in lower case, parameter), and ("", parameter) for parts without a class.
    """
    found: dict[tuple[str, str], str] = {}
    for place in MEANINGS.get(name, ()):
        module, _, key = place.partition(":")
        value = getattr(import_module(module), key)
        for names, _, lines in NumpyDocString(value.__doc__ or "")["Parameters"]:
            text = re.split(r"\. (?=[A-Z])", " ".join(line.strip() for line in lines))[0]
            text = text.rstrip(".:").replace("|", "\\|").replace("``", "`")
            for one in names.split(", "):
                found.setdefault(("", one), text)
                found[key.lower(), one] = text
    return found
