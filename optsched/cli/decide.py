"""``optsched decide``: who starts where and who is released, by one of Determined's schedulers."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

if TYPE_CHECKING:
    from optsched.formats.decide_json import Overrides


def decide(
    state: Annotated[
        Path | None,
        typer.Argument(
            help="Agents, groups and tasks: optsched.decide/1; - reads stdin.", show_default=False
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="fair_share or priority [default: what the state says].", show_default=False
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="code: as Determined decides; docs: as its documentation says.", show_default=False
        ),
    ] = None,
    no_preemption: Annotated[
        bool, typer.Option("--no-preemption", help="Nobody is released for a better priority.")
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option(help="best: fullest agents first; worst: emptiest.", show_default=False),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Answer one state per line of stdin.")
    ] = False,
) -> None:
    """Decide who starts on which agents and who is released, as Determined does; prints JSON.

    The answer is optsched.decision/1. Options go before the settings in the state. Nothing is
    remembered: the same state gets the same answer. In a stream, "id" comes back with it.
    """  # fmt: skip
    from optsched.cluster.determined.pools import SCHEDULERS
    from optsched.cluster.determined.shares import VARIANTS
    from optsched.cluster.determined.state import FITS
    from optsched.errors import InputError
    from optsched.formats.decide_json import Overrides
    from optsched.io.values import one_of

    for key, value, words in (
        ("scheduler", scheduler, SCHEDULERS), ("variant", variant, VARIANTS), ("fit", fit, FITS),
    ):  # fmt: skip
        if value is not None:
            one_of(key, value, words)
    overrides = Overrides(scheduler, variant, False if no_preemption else None, fit)
    if stream:
        if state is not None and str(state) != "-":
            raise InputError(f"stream: states are read from stdin; leave out {str(state)!r:.60}")
        answer_all(overrides, sys.stdin.buffer, sys.stdout.buffer)
        return
    if state is None:
        raise InputError("state: which? give a file, - for stdin, or --stream")
    sys.stdout.write(answer(state, overrides).decode())


def answer(state: Path, overrides: Overrides) -> bytes:
    """The answer to the state in a file, or on stdin."""
    from optsched.formats.decide_json import read
    from optsched.io.files import decode_text, read_text

    if str(state) == "-":
        name, text = "stdin", decode_text(sys.stdin.buffer.read(), "stdin")
    else:
        name, text = str(state), read_text(state)
    pools, given = read(text, name, overrides)
    return _answered(pools, given)


def answer_all(overrides: Overrides, lines: BinaryIO, answers: BinaryIO) -> None:
    """Answer every line; a bad one gets an error object, and the next is read.

    Parameters
    ----------
    overrides
        Settings that go before those of the states.
    lines, answers
        An answer is written and flushed before the next line is read.
    """
    from optsched.errors import InputError
    from optsched.formats.decide_json import Answer, from_tree, to_json
    from optsched.io.files import decode_text
    from optsched.io.strict_json import parse

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        given = None
        try:
            tree = parse(decode_text(line, f"line {number}"), f"line {number}")
            given = _identity(tree)
            pools, given = from_tree(tree, f"line {number}", overrides)
            text = _answered(pools, given)
        except InputError as error:
            text = to_json(Answer(id=given, error=str(error)))
        answers.write(text)
        answers.flush()


def _answered(pools: object, given: object) -> bytes:
    from optsched.cluster.determined import decide as decide_pools
    from optsched.formats.decide_json import answer_of, to_json

    return to_json(answer_of(pools, decide_pools(pools), given))  # type: ignore[arg-type]


def _identity(tree: object) -> int | str | None:
    """The id of a line, also if the rest is wrong."""
    found = tree.get("id") if isinstance(tree, dict) else None
    return found if isinstance(found, (int, str)) and not isinstance(found, bool) else None
