"""Whole files: all of the new content or all of the old, and one sentence when it fails."""

from __future__ import annotations

import math
import os
import stat
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from optsched import InputError
from optsched.io import files
from optsched.io.files import check_writable, decode_text, read_bytes, read_text, write_atomic
from optsched.io.values import boolean, format_value, integer, json_value, number, one_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_write_and_read(tmp_path: Path) -> None:
    """Text is UTF-8; nothing but the file is left in the folder."""
    path = tmp_path / "x.txt"
    write_atomic(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert read_text(path) == "grün\n"
    write_atomic(path, b"\x00\xff")
    assert read_bytes(path) == b"\x00\xff"
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("broken", ["replace", "chmod", "fdopen"])
def test_failure_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """When a step of writing fails, the old content stays and no temporary file does."""
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(InputError) as caught:
        write_atomic(path, "new")
    assert str(caught.value) == f"{path}: cannot be written (No space left on device)"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_interrupt_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while writing goes through, and leaves no temporary file."""
    path = tmp_path / "x.txt"
    path.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomic(path, "x")])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is a directory, expected a file name"),
        ("no/x", "cannot be written (there is no folder "),
        ("file/x", "cannot be written (there is no folder "),
        ("x" * 300, "cannot be written (File name too long)"),
        ("y" * 300 + "/x", "cannot be written ("),
        ("x\0y", "cannot be written ("),
    ],
    ids=["folder", "no folder", "below a file", "long", "below a long one", "null byte"],
)
def test_hopeless_paths(tmp_path: Path, write: object, name: str, reason: str) -> None:
    """Refused with the path and the reason, before and while writing."""
    (tmp_path / "file").write_text("old")
    path = f"{tmp_path}/{name}"
    with pytest.raises(InputError) as caught:
        write(path)  # type: ignore[operator]
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert os.listdir(tmp_path) == ["file"]


def test_permission_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for whoever runs the tests as superuser."""
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission in"):
        check_writable(tmp_path / "x")


def test_permissions(tmp_path: Path) -> None:
    """A new file gets what the umask leaves, an old one keeps its own."""
    path = tmp_path / "x"
    old = os.umask(0o027)
    try:
        write_atomic(path, "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    write_atomic(path, "y")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_links_are_followed(tmp_path: Path) -> None:
    """What a link points to is replaced, the link stays."""
    (tmp_path / "folder").mkdir()
    link, real = tmp_path / "link", tmp_path / "folder" / "real"
    link.symlink_to(real)
    write_atomic(link, "x")
    assert link.is_symlink()
    assert real.read_text() == "x"


def test_pipes_are_written_to(tmp_path: Path) -> None:
    """A pipe (as /dev/stdout may be) gets the bytes; it is not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    check_writable(pipe)
    write_atomic(pipe, "x")
    reader.join()
    assert got == ["x"]
    assert pipe.is_fifo()


def test_unreadable(tmp_path: Path) -> None:
    """A folder, nothing, a name too long or with a null byte: one sentence each."""
    expected = {
        tmp_path: "is a directory, expected a file",
        tmp_path / "no": "no such file",
        tmp_path / ("x" * 300): "cannot be read (File name too long)",
        f"{tmp_path}/a\0b": "cannot be read (embedded null byte)",
    }
    for path, reason in expected.items():
        with pytest.raises(InputError) as caught:
            read_bytes(path)
        assert str(caught.value) == f"{path}: {reason}"


def test_endless_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reading stops at the largest size, for devices and for files."""
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="has more than 1000 bytes"):
        read_bytes("/dev/zero")
    path = tmp_path / "x"
    path.write_bytes(bytes(1001))
    with pytest.raises(InputError, match="has 1001 bytes, more than 1000"):
        read_bytes(path)
    path.write_bytes(bytes(1000))
    assert len(read_bytes(path)) == 1000


def test_text_must_be_utf8() -> None:
    """A byte-order mark is skipped; the first bad byte is named with its line."""
    assert decode_text(b"\xef\xbb\xbfab", "f") == "ab"
    with pytest.raises(InputError) as caught:
        decode_text(b"a\nb\xff", "f")
    assert str(caught.value) == "f:2: not a text file in UTF-8 (byte 3 is 0xff)"
    with pytest.raises(InputError, match="f:1: not a text file"):
        decode_text("{}".encode("utf-16"), "f")


# checks of single values: one sentence each, with the place, the rule and the value


def test_values_of_numpy_become_plain() -> None:
    """What is accepted is of Python's own type."""
    assert type(integer("x", np.int32(3))) is int
    assert type(number("x", np.float32(0.5))) is float
    assert number("x", math.inf, infinite=True) == math.inf
    assert json_value("x", {"a": (np.bool_(True), np.int8(1), None)}) == {"a": [True, 1, None]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: integer("x", True), "x: expected an integer in 0..2^53, got True"),
        (lambda: integer("x", 3.0), "x: expected an integer in 0..2^53, got 3.0"),
        (lambda: integer("x", "3"), 'x: expected an integer in 0..2^53, got "3"'),
        (lambda: integer("x", -1, 0, 7), "x: expected an integer in 0..7, got -1"),
        (lambda: integer("x", 1, -(2**53), 0), "x: expected an integer in -2^53..0, got 1"),
        (lambda: integer("x", 10**80), "got a number of more than 60 digits"),
        (lambda: number("x", math.nan), "x: expected a finite number >= 0, got nan"),
        (lambda: number("x", math.inf), "x: expected a finite number >= 0, got inf"),
        (lambda: number("x", math.nan, infinite=True), "x: expected a number >= 0, got nan"),
        (lambda: number("x", 0, most=1, above=True), "x: expected a number > 0 and <= 1, got 0"),
        (lambda: number("x", -1, what="seconds"), "x: expected seconds >= 0, got -1"),
        (lambda: number("x", np.bool_(True)), "x: expected a finite number >= 0, got True"),
        (lambda: boolean("x", 1), "x: expected True or False, got 1"),
        (lambda: one_of("x", "c", ("a", "b")), 'x: expected one of a, b, got "c"'),
        (lambda: one_of("x", ["a"], ("a", "b")), "x: expected one of a, b, got ['a']"),
        (lambda: json_value("x", {"a": {1}}), "x.a: expected plain JSON values, got a set"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    """The message names the place, the rule and the value."""
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_a_shown_value_is_one_short_line() -> None:
    """Nothing long, broken or invisible in a message."""
    assert format_value("a\u202eb") == '"a\\u202eb"'
    assert format_value(np.arange(1000)).endswith("...")
    assert all(len(format_value(x)) <= 60 for x in ("a" * 900, list(range(900)), 10**900))
    assert "\n" not in format_value(np.zeros((3, 3)))
