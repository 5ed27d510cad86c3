"""Print the changelog's section of a tag such as v0.1.0; fail where files name another version."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(tag: str) -> str:
    """Section of the changelog for this tag, once all files agree on version and date.

    Raises
    ------
    SystemExit
        A file names another version or date.
    """
    version = tag.removeprefix("v")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if found is None:
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - DATE'")
    wanted = {
        "optsched/version.py": f'__version__ = "{version}"',
        "CITATION.cff": f"version: {version}\ndate-released: {found[1]}\n",
    }
    for path, line in wanted.items():
        if line not in (ROOT / path).read_text():
            sys.exit(f"{path} must have {line!r}")
    return found[2].strip() + "\n"


if __name__ == "__main__":
    print(notes(sys.argv[1]), end="")
