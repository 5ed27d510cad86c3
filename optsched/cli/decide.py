"""``optsched decide``: which tasks start where, by a scheduler of Determined or Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated, Any

from optsched.cli.options import argument, option
from optsched.cli.output import answer_lines, stdin_or_file
from optsched.cluster.determined import decide as decide_pools
from optsched.cluster.determined.document import Answer, answer_of, from_tree, to_json
from optsched.errors import InputError
from optsched.io.files import decode_text
from optsched.io.strict_json import parse, without_collector


def decide(
    state: Annotated[Path | None, argument("optsched.decide/1; - reads stdin.")] = None,
    scheduler: Annotated[
        str | None, option("fair_share, priority, kubernetes [default: state].")
    ] = None,
    variant: Annotated[str | None, option("code (as it decides) or docs.")] = None,
    preemption: Annotated[
        bool | None,
        option(
            "Release tasks for a better priority [default: state, off].",
            "--preemption/--no-preemption",
        ),
    ] = None,
    mode: Annotated[str | None, option("Of kubernetes: default or gang.")] = None,
    fit: Annotated[str | None, option("best (fullest agents first) or worst.")] = None,
    stream: Annotated[bool, option("A state per line of stdin.", "--stream")] = False,
) -> None:
    """Decide which tasks start where and which are released; print optsched.decision/1.

    Options override the settings in the state. The same state gets the same decision. In a
    stream, "id" is returned with it.

    Example: optsched decide state.json --scheduler priority --preemption
    """
    given = {
        "scheduler": scheduler, "variant": variant, "preemption": preemption, "mode": mode,
        "fit": fit,
    }  # fmt: skip
    overrides = {key: value for key, value in given.items() if value is not None}
    if stream:
        if state is not None and str(state) != "-":
            raise InputError(f"stream: states are read from stdin; leave out {str(state)!r:.60}")
        answer_lines(
            sys.stdin.buffer,
            sys.stdout.buffer,
            lambda number, line: _answer(line, f"line {number}", overrides),
        )
        return
    if state is None:
        raise InputError("state: missing; give a file, - for stdin, or --stream")
    name, text = stdin_or_file(state)
    with without_collector():
        pools, given_id = from_tree(parse(text, name), name, overrides)
    sys.stdout.write(_decided(pools, given_id).decode())


def _answer(line: bytes, name: str, overrides: dict[str, Any]) -> bytes:
    """Answer one line; an invalid one gets an error object."""
    given = None
    try:
        tree = parse(decode_text(line, name), name)
        found = tree.get("id") if isinstance(tree, dict) else None
        if isinstance(found, (int, str)) and not isinstance(found, bool):
            given = found  # also if other fields are invalid
        return _decided(*from_tree(tree, name, overrides))
    except InputError as error:
        return to_json(Answer(id=given, error=str(error)))


def _decided(pools: object, given: object) -> bytes:
    return to_json(answer_of(pools, decide_pools(pools), given))  # type: ignore[arg-type]
