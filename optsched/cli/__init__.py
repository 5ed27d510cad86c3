"""The command line: ``optsched solve | verify | show | convert | generate | ...``."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Entry point; exit codes: 0 done, 1 infeasible or a wrong schedule, 2 bad input or usage."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # names may contain characters outside the encoding
                stream.reconfigure(errors="backslashreplace")
        code = _flushed(_run())
    except KeyboardInterrupt:  # at any moment, loading included
        say("interrupted")
        code = 130
    sys.exit(code)


def _run() -> int:
    from optsched import errors

    try:
        from optsched.cli.app import run

        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            return run()
    except SystemExit as done:  # the usual end
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (errors.InputError, errors.UnsupportedProblem, errors.MissingExtra) as error:
        say(f"error: {error}")
        return 2
    except errors.Infeasible as error:
        say(f"infeasible: {error}")
        return 1
    except errors.OptschedError as error:  # the input is right: a failed job, a broken proof
        say(f"failed: {error}")
        return 1
    except MemoryError:
        say("failed: not enough memory")
        return 1
    except BrokenPipeError as error:
        return _lost(error, 0)
    except OSError as error:  # files report as an InputError: this is the terminal, or the system
        say(f"failed: {error}")
        return 1


def _flushed(code: int) -> int:
    """Flush stdout, while a failure can still be reported."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _lost(error, code)
    return code


def _lost(error: OSError, code: int) -> int:
    """Handle a closed stdout: silent after a broken pipe, as of `head`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # else the interpreter fails at exit
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return code
    say(f"error: the output cannot be written ({error.strerror})")
    return 2


def say(message: str) -> None:
    """Print one line on stderr; control characters are replaced."""
    line = " ".join(message.split())
    try:
        print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr, flush=True)
    except OSError:  # stderr is closed: only the exit code is left
        sys.stderr = None
