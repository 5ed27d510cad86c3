"""The command line: ``optsched solve | verify | show | plot | trace | generate | ...``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; exit codes: 0 done, 1 infeasible or not verified, 2 bad input or usage."""
    from optsched.cli.app import app
    from optsched.errors import InputError, MissingExtra, OptschedError, UnsupportedProblem

    try:
        app()
    except (InputError, UnsupportedProblem, MissingExtra) as error:
        _say(f"error: {error}")
        sys.exit(2)
    except OptschedError as error:  # nothing wrong with the input: a failed job, a broken proof
        _say(f"failed: {error}")
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        sys.exit(0)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(130)


def _say(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    line = " ".join(message.split())
    print(line.encode("utf-8", "replace").decode(), file=sys.stderr)
