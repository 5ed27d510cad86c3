"""Print constraints that hold every direct dependency at the lowest version allowed.

PyTorch stays as in constraints.txt: older wheels need CUDA libraries.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
texts = [*project["dependencies"], *(text for extra in extras.values() for text in extra)]
lowest = dict(
    re.match(r"([\w-]+)>=([\w.]+)(?:;|$)", text).groups() for text in texts if ">=" in text
)
lowest["torch"] = re.search(r"^torch==(.+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
print(*(f"{name}=={version}" for name, version in sorted(lowest.items())), sep="\n")
