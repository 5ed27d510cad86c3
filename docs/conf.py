"""Build of the documentation: `make docs` writes out/site/index.html."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "solvers"), str(HERE / "_ext")]

from generated import outside_links, write_all  # noqa: E402

from optsched.version import __version__  # noqa: E402

project = "optsched"
author = "the optsched authors"
release = version = __version__
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_*", "reference/generated"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

templates_path = ["_templates"]
default_role = "autolink"  # names in single backticks
autosummary_generate = [str(path) for path in (HERE / "reference" / "api").glob("*.rst")]
autosummary_filename_map = {  # on disks that ignore case
    "optsched.plan.Plan": "optsched.plan.Plan-class",
    "optsched.pipelines.Partition": "optsched.pipelines.Partition-class",
}
python_maximum_signature_line_length = 80
autodoc_typehints = "none"  # signatures have them; numpydoc has the text
numpydoc_show_class_members = False

# a build must not need a network: INTERSPHINX=1 links names of other libraries
intersphinx_mapping = {
    name: (url, None)
    for name, url in {
        "python": "https://docs.python.org/3",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
        "optuna": "https://optuna.readthedocs.io/en/stable",
    }.items()
    if os.environ.get("INTERSPHINX")
}

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "ignore_pattern": r"examples/(go|kubernetes|service|slurm)/",
    "filename_pattern": r"/(?!sync_cluster|tiny_gpt)\w+\.py$",  # a cluster; a part of another
    "nested_sections": False,
    "image_scrapers": ("generated.figures",),
    "reset_argv": "generated.arguments",
    "reset_modules": (),
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "min_reported_time": 3600,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = f"optsched {release}"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_depth": 3,
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": []}
html_show_sphinx = False
html_copy_source = False

write_all(HERE / "reference" / "generated")


def setup(app: Sphinx) -> None:
    """Register what Markdown in the checkout has, and a site has not."""
    app.add_lexer("csv", TextLexer)
    app.connect("source-read", outside_links)
