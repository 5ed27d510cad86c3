"""JSON that is exactly right, or refused with the place."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError
from optsched.io.strict_json import check_format, decode, format_json, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


NAMED = sys.version_info >= (3, 13)  # the standard library names the trailing comma
TRAILING = "3: not valid JSON: illegal trailing comma" if NAMED else "4: not valid JSON: expecting"


def refusal(text: str) -> str:
    """The message of a refused text."""
    with pytest.raises(InputError) as caught:
        parse(text, "f")
    message = str(caught.value)
    assert message.isprintable() and len(message) < 300
    return message


@given(VALUES, st.booleans())
def test_good_json_is_read_as_the_standard_library_does(value: Any, ascii_only: bool) -> None:
    """Escaped or not, every JSON value comes through unchanged."""
    assert parse(json.dumps(value, ensure_ascii=ascii_only), "f") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f:1:1: not valid JSON: the file is empty"),
        (" \n ", "f:2:2: not valid JSON: the file is empty"),
        ('{"a": 1', "f:1:8: not valid JSON: the text ends too early (truncated?)"),
        ("[1, 2", "f:1:6: not valid JSON: the text ends too early (truncated?)"),
        ('{"a": 1} x', "f:1:10: not valid JSON: extra data"),
        ("{\n'a': 1}", "f:2:1: not valid JSON: expecting property name"),
        ("[1,]", f"f:1:{TRAILING}"),
        ("[01]", "f:1:3: not valid JSON: expecting ',' delimiter"),
        ('["a\nb"]', "f:1:4: not valid JSON: invalid control character"),
        ('["\\x"]', "f:1:3: not valid JSON: invalid \\escape"),
        ("[\n\nNaN]", "f:3: NaN is not a JSON number"),
        ('["NaN",\n-Infinity]', "f:2: -Infinity is not a JSON number"),
        ("[1,\n1e999]", "f:2: 1e999 is too large a number"),
        ("[-1" + "0" * 400 + ".5]", "f:1: -1000000000000000000... is too large a number"),
        ("[" + "9" * 5000 + "]", "f: a number has more digits than any 64-bit integer"),
        ("[" * 100_000, "f: nested too deeply"),
        ('{"a":' * 100_000, "f: nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', 'f: key "a" appears twice in an object of "a", "b"'),
        ('{"x": [0, {"k": 1, "k": 1}]}', 'f: key "k" appears twice in an object of "k"'),
        ('["\\ud800"]', "f: half a surrogate pair, U+D800, is no character"),
        ('{"a": {"\\udc00x": 1}}', "f: half a surrogate pair, U+DC00, is no character"),
        ('["\\ud83d\\ud83d"]', "f: half a surrogate pair, U+D83D, is no character"),
        ('["é\ud800"]', "f: half a surrogate pair, U+D800, is no character"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    """One printable line with file, place and reason."""
    assert refusal(text).startswith(message)


def test_whole_pairs_are_characters() -> None:
    """An escaped surrogate pair is one character; a backslash before a u may be text."""
    assert parse('["\\ud83d\\ude00", "\\\\ud800"]', "f") == ["\U0001f600", "\\ud800"]


@given(VALUES, st.data())
def test_truncated_containers_are_refused(value: Any, data: st.DataObject) -> None:
    """Every proper prefix of an object is refused with a line and a column."""
    text = json.dumps({"a": value})
    cut = data.draw(st.integers(0, len(text) - 1))
    assert refusal(text[:cut]).startswith("f:1:")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the parser fail in any other way, and what it accepts is JSON."""
    try:
        tree = parse(text, "f")
    except InputError as error:
        assert str(error).startswith("f:")
    else:
        assert tree == json.loads(text)


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One integer and one name."""

    n: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    name: str = ""


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    """A list of parts, and a mapping of them."""

    parts: list[Part]
    named: dict[str, Part] = {}
    flag: bool = False
    note: int | None = None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, 'f: top level: the field "parts" is missing'),
        ({"parts": 3}, "f: parts: expected a list, got 3"),
        ({"parts": [5]}, "f: parts[0]: expected an object, got 5"),
        ({"parts": [{"n": 1}, {}]}, 'f: parts[1]: the field "n" is missing'),
        ({"parts": [{"n": 1.0}]}, "f: parts[0].n: expected an integer, got 1.0"),
        ({"parts": [{"n": True}]}, "f: parts[0].n: expected an integer, got true"),
        ({"parts": [{"n": "1"}]}, 'f: parts[0].n: expected an integer, got "1"'),
        ({"parts": [{"n": None}]}, "f: parts[0].n: expected an integer, got null"),
        ({"parts": [{"n": -3}]}, "f: parts[0].n: expected an integer >= 0, got -3"),
        (
            {"parts": [{"n": 2**53 + 1}]},
            "f: parts[0].n: expected an integer <= 2^53, got 9007199254740993",
        ),
        (
            {"parts": [{"n": 10**70}]},
            "f: parts[0].n: expected an integer <= 2^53, got a number of more than 60 digits",
        ),
        ({"parts": [{"n": 1, "name": [1]}]}, "f: parts[0].name: expected a string, got a list"),
        ({"parts": [{"n": 1, "x": 2}]}, 'f: parts[0]: unknown field "x"; expected one of n, name'),
        (
            {"parts": [{"n": 1, "a\nb`": 2}]},
            'f: parts[0]: unknown field "a\\nb`"; expected one of n, name',
        ),
        (
            {"parts": [], " - at `$.x`": 2},
            'f: top level: unknown field " - at `$.x`"; expected one of parts, named, flag, note',
        ),
        ({"parts": [], "flag": 1}, "f: flag: expected true or false, got 1"),
        ({"parts": [], "note": {}}, "f: note: expected an integer or null, got an object"),
        ({"parts": [], "named": {"a.b": 5}}, "f: named.*: expected an object, got an integer"),
        ({"parts": [], "named": {"a": {}}}, 'f: named.*: the field "n" is missing'),
        (
            {"parts": [], "named": {"a": {"n": True}}},
            "f: named.*.n: expected an integer, got true or false",
        ),
        ({"parts": [], "named": {"a": {"n": -1}}}, "f: named.*.n: expected an integer >= 0"),
    ],
)
def test_decode(tree: Any, message: str) -> None:
    """Path, rule and value in words; integers are never floats, booleans or strings."""
    with pytest.raises(InputError) as caught:
        decode(tree, Whole, "f")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "f: expected a JSON object, got a list"),
        ({}, 'f: format: expected "a.b/2", got nothing'),
        ({"format": 2}, 'f: format: expected "a.b/2", got 2'),
        ({"format": "c/2"}, 'f: format: expected "a.b/2", got "c/2"'),
        ({"format": "a.b/1"}, 'f: format: "a.b/1" is unknown, this optsched reads "a.b/2"'),
        ({"format": "a.b/3"}, 'f: format: "a.b/3" is newer than this optsched reads ("a.b/2")'),
        ({"format": "a.b/2.1"}, 'f: format: expected "a.b/2", got "a.b/2.1"'),
        ({"format": "a.b/" + "9" * 5000}, 'f: format: expected "a.b/2", got "a.b/999'),
    ],
)
def test_check_format(tree: Any, message: str) -> None:
    """Another family, an older and a newer version are told apart."""
    with pytest.raises(InputError) as caught:
        check_format(tree, "a.b/2", "f")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@given(st.text() | st.integers() | st.floats() | st.none() | st.booleans())
def test_shown_is_one_short_printable_line(value: Any) -> None:
    """Whatever a document holds, a message can repeat it."""
    text = format_json(value)
    assert len(text) <= 60
    assert "\n" not in text and "\x1b" not in text
    text.encode()
