"""The interactive page: complete, self-contained, and deaf to hostile names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import periodic_schedules, schedules, spoilt

from optsched.analysis.critical_path import critical_path
from optsched.errors import InputError
from optsched.io.text import one_line, readable_unit
from optsched.model.schedule import Csr, Resource, Schedule
from optsched.plots import html

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = (
    "&\u2028</script><script>alert(1)</script><!--TITLE-->/*DATA*/<img src=x onerror=alert(2)>\"'"
)


class Page(HTMLParser):
    """Elements, their attributes, and the text of title and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {"title": [], "script": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))
        if tag in self.text:
            self.open.append(tag)
            self.text[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        """Stop listening."""
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        """Note text."""
        if self.open:
            self.text[self.open[-1]][-1] += data


def data_of(text: str) -> dict[str, Any]:
    """What the page knows."""
    return json.loads(Page(text).text["script"][0])


def one_operation(name: str) -> Schedule:
    """The same name wherever a document may have one."""
    return Schedule(
        name=name,
        resources=(Resource(name, 5),),
        duration=np.array([3]),
        op_resources=Csr.of([[0]]),
        kind=np.array([name[:16]]),
        acquire=np.array([4]),
        sequences=Csr.of([[0]]),
        start=np.array([0]),
    )


@given(schedules())
def test_page_holds_the_whole_schedule(s: Schedule) -> None:
    """Bars, fields, memory and critical path are those of the schedule."""
    data = data_of(html.page(s))
    bars, operations = data["bars"], data["operations"]
    seen = sorted(zip(bars["operation"], bars["resource"], strict=True))
    wanted = [
        (i, r) for i in range(s.n_operations) for r in sorted(s.op_resources[i].tolist()) or [-1]
    ]
    assert seen == sorted(wanted)
    for i, start, end in zip(bars["operation"], bars["start"], bars["end"], strict=True):
        assert (start, end) == (s.start[i], s.end[i])
    for key in ("job", "stage", "duration", "release", "acquire", "free", "workspace", "family"):
        assert operations.get(key, [0] * s.n_operations) == getattr(s, key).tolist()
    kinds = [data["kinds"][k]["name"] for k in operations["kind"]]
    assert kinds == s.kind.tolist()
    assert [i for i, _ in data["critical"]] == critical_path(s)
    assert len(data["memory"]) in (0, s.n_resources)
    assert [r["memory"] for r in data["resources"]] == s.memory.tolist()


@given(periodic_schedules(), st.integers(1, 3))
def test_periodic_pages_show_the_steady_state(s: Schedule, cycles: int) -> None:
    """Every operation once per cycle; what runs across time 0 once more."""
    data = data_of(html.page(s, cycles=cycles))
    assert data["span"] == s.period * cycles
    for i in range(s.n_operations):
        across = int(s.start[i] + s.duration[i] > s.period)
        assert data["bars"]["operation"].count(i) == (cycles + across) * max(
            1, len(s.op_resources[i])
        )


@given(spoilt(st.one_of(schedules(), periodic_schedules())))
def test_wrong_schedules_are_still_drawn(s: Schedule) -> None:
    """The page shows what the document says, right or wrong."""
    assert data_of(html.page(s))["span"] > 0


def test_hostile_names_stay_text() -> None:
    """A name can neither close its script, nor add an element, nor reach a placeholder."""
    harmless, hostile = (Page(html.page(one_operation(name))) for name in ("x", HOSTILE))
    assert hostile.elements == harmless.elements
    assert len(hostile.text["script"]) == 2
    assert hostile.text["title"] == [one_line(HOSTILE)]
    data = json.loads(hostile.text["script"][0])
    assert data["name"] == one_line(HOSTILE)
    assert data["resources"][0]["name"] == one_line(HOSTILE, 60)
    assert hostile.text["script"][1] == harmless.text["script"][1]
    assert not set("<>&\u2028") & set(hostile.text["script"][0])


def test_page_is_self_contained() -> None:
    """No address, no foreign file, no inline handler; the policy forbids all loading."""
    text = html.page(one_operation("x"))
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\b|XMLHttp|import\(", text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert not {"src", "href", "srcdoc", "action"} & attributes.keys()
        assert not [key for key in attributes if key.startswith("on")]
    assert "innerHTML" not in text
    assert "default-src 'none'" in text


def test_elements_that_the_script_needs_are_there() -> None:
    """Every id that the script asks for exists once."""
    page = Page(html.page(one_operation("x")))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    asked = set(re.findall(r"\$\(\"(\w+)\"\)", page.text["script"][1]))
    assert asked <= set(ids)
    assert len(set(ids)) == len(ids)


def test_graphs_and_cycles_are_refused(tmp_path: Path) -> None:
    """One sentence and no file."""
    s = one_operation("x")
    with pytest.raises(InputError, match="not scheduled"):
        html.write(s.graph(), tmp_path / "x.html")
    with pytest.raises(InputError, match=re.escape("cycles: expected 1..100, got 0")):
        html.write(replace(s, period=5), tmp_path / "x.html", cycles=0)
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=120))
def test_plain_names_are_one_safe_line(name: str) -> None:
    """Printable, short, and unchanged where there was nothing to change."""
    shown = one_line(name)
    assert shown.isprintable()
    assert len(shown) <= 80
    if name.isprintable() and len(name) <= 80:
        assert shown == name


@pytest.mark.parametrize(
    ("unit", "span", "name", "ticks"),
    [("us", 4999, "µs", 1), ("us", 5000, "ms", 1e3),
      ("s", 300, "min", 60), ("ms", 10**9, "days", 86_400_000)],
)  # fmt: skip
def test_readable_unit(unit: str, span: int, name: str, ticks: float) -> None:
    """The largest unit in which the span is at least 5."""
    assert readable_unit(unit, span) == (name, ticks)
