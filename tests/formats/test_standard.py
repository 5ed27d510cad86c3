"""The standard job-shop text: round trips, every hostile input, and mutation fuzzing of ft10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import JobShop
from optsched.errors import InputError
from optsched.formats import standard

FT10 = Path(__file__).parents[2] / "instances" / "jobshop" / "ft10.txt"
TEXT = standard.to_text(JobShop.read(FT10))
LINES = TEXT.splitlines()
TOKENS = [line.split(" ") for line in LINES]


@st.composite
def shops(draw: st.DrawFn) -> JobShop:
    """Shops without windows: re-entrant, skipped machines, zero and huge durations."""
    m = draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, m - 1), st.integers(0, 9) | st.integers(0, 2**46))
    jobs = draw(st.lists(st.lists(pair, min_size=1, max_size=6), min_size=1, max_size=6))
    return JobShop(jobs, [f"m{k}" for k in range(m)], name="drawn")


def outcome(text: str) -> JobShop | None:
    """The shop that the reader makes of a text, or None if it refuses it properly."""
    try:
        return standard.from_text(text, "ft10.txt")
    except InputError as error:
        assert str(error).startswith("ft10.txt:")
        return None


def joined(rows: list[list[str]]) -> str:
    """Rows of tokens as text."""
    return "".join(" ".join(row) + "\n" for row in rows)


# reading what is right


@given(shops())
def test_round_trip(shop: JobShop) -> None:
    """What is written is read back, re-entrant rows by the switch only."""
    text = standard.to_text(shop)
    assert standard.from_text(text, "dir/drawn.txt", reentrant=True) == shop
    if shop.is_classic:
        assert standard.from_text(text, "drawn.txt") == shop
    else:
        with pytest.raises(InputError, match=r"^drawn.txt:\d+: "):
            standard.from_text(text, "drawn.txt")


@given(st.data())
def test_layout_does_not_matter(data: st.DataObject) -> None:
    """Byte-order mark, CRLF, tabs, blanks, comments, leading zeros: the same instance."""
    gap = st.sampled_from([" ", "\t", "  ", " \t "])
    end = st.sampled_from(["\n", "\r\n", " \n", "\n\n", "\n  # note 1 2\n", "\t\r\n"])
    text = "".join(
        "".join(
            data.draw(gap) + token.rjust(data.draw(st.sampled_from([1, 4])), "0") for token in row
        )
        + data.draw(end)
        for row in TOKENS
    )
    assert standard.from_text(text, "ft10.txt") == standard.from_text(TEXT, "ft10.txt")


# refusing what is wrong


HOSTILE: list[tuple[str, str]] = [
    ("", r"^f.txt:1: .*the file is empty"),
    ("3 2\n0 3 1 2\n1 4 0 1\n", r"^f.txt:3: expected 3 rows of pairs, one a job, got 2"),
    ("2 3\n0 3 1 2\n1 4 0 1\n", r"^f.txt:2: expected 3 pairs \(machine duration\), got 2$"),
    ("2\n0 3\n", r"^f.txt:1: expected 2 numbers \(jobs machines\), got 1"),
    ("0 2\n", r"^f.txt:1: expected at least 1 job, got 0"),
    ("1 1\n0 -3\n", r"^f.txt:2: expected a duration in 0..2\^53, got -3"),
    ("1 1\n0 1.5\n", r'^f.txt:2: expected an integer \(digits 0-9\), got "1.5"'),
    ("1 1\n0 1e3\n", r'^f.txt:2: expected an integer .*got "1e3"'),
    ("1 1\n0 ٣\n", r'^f.txt:2: expected an integer .*got "٣"'),
    ("1 1\n0 " + "7" * 3_000_000 + "\n", r"^f.txt:2: .*got a number of 3000000 digits"),
    ("1 " + "9" * 40 + "\n0 1\n", r"^f.txt:1: .*a number of 40 digits"),
    ("1 2\n0 9007199254740992 1 1\n", r"^f.txt: jobs: .*add up to 9007199254740993, above 2\^53"),
    ("1 2\n1 3 2 5\n", r"^f.txt:2: .*0..1, got 2 \(machines are 0-based here\)"),
    ("1 2\n0 3 7 5\n", r"^f.txt:2: expected a machine in 0..1, got 7$"),
    (
        "1 3\n2 3 1 5 2 6\n",
        r"^f.txt:2: .*machine 2 twice; .*read it with reentrant=True",
    ),
    ("1 1\n0 5\x00\n", r"^f.txt:2: expected an integer .*got"),
]


REENTRANT: list[tuple[str, str]] = [
    ("1 2\n0 3 1\n", r"^f.txt:2: expected pairs .*got 1 and a single number"),
    ("2 2\n0 3\n", r"^f.txt:2: expected 2 rows of pairs, one a job, got 1"),
    ("1 2\n0 3 2 1\n", r"^f.txt:2: .*got 2 \(machines are 0-based here\)"),
    ("1 1000000000\n0 3\n", r"^f.txt: machines: expected at most 100000, got 1000000000"),
]


@pytest.mark.parametrize(
    ("text", "message", "reentrant"),
    [(*case, False) for case in HOSTILE] + [(*case, True) for case in REENTRANT],
)
def test_hostile_text(text: str, message: str, reentrant: bool) -> None:
    """File, line, expectation and finding; the switch loosens the row width only."""
    with pytest.raises(InputError, match=message):
        standard.from_text(text, "f.txt", reentrant)


def test_reentrant_means_standard() -> None:
    """The switch contradicts the other formats."""
    formats: list[Any] = ["taillard", "json"]
    for format in formats:
        with pytest.raises(InputError, match='reentrant=True goes with format "standard"'):
            JobShop.read(FT10, format=format, reentrant=True)


# mutations of ft10

PLACES = [(r, c) for r, row in enumerate(TOKENS) for c in range(len(row))]


@pytest.mark.parametrize("mutation", ["drop", "double"])
def test_a_token_or_line_less_or_more_is_noticed(mutation: str) -> None:
    """Dropping or doubling any token or any line of the file is refused."""
    copies = 2 if mutation == "double" else 0
    for r, row in enumerate(TOKENS):
        changed = [[row] * copies]
        changed += [[row[:c] + [token] * copies + row[c + 1 :]] for c, token in enumerate(row)]
        for rows in changed:
            assert outcome(joined([*TOKENS[:r], *rows, *TOKENS[r + 1 :]])) is None, (r, rows)


@given(st.sampled_from(PLACES), st.sampled_from(PLACES), st.sampled_from(["lines", "swap", "cut"]))
def test_other_tokens_are_another_shop_or_noticed(
    a: tuple[int, int], b: tuple[int, int], how: str
) -> None:
    """Swapped lines or tokens, and cut ones: the shop is exactly the text, or refused."""
    rows = [list(row) for row in TOKENS]
    (ra, ca), (rb, cb) = a, b
    if how == "lines":
        rows[ra], rows[rb] = rows[rb], rows[ra]
    elif how == "swap":
        rows[ra][ca], rows[rb][cb] = rows[rb][cb], rows[ra][ca]
    else:
        rows[ra][ca] = rows[ra][ca][:-1]
    shop = outcome(joined(rows))
    assert shop is None or standard.to_text(shop) == joined(rows)
    if how == "lines":  # jobs in another order
        assert (shop is not None) == (rows == TOKENS or bool(ra and rb))
    elif shop is not None and rows != TOKENS:
        assert ra and (how == "cut" or rb)
        assert ca % 2 == 1 or (how == "swap" and ra == rb and cb % 2 == 0)
