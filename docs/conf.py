"""Sphinx settings. The reference pages are written anew, from the code, each time this file is read."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import _generate

import hydra_parallelism

_generate.write_reference()

# Public names load on first use, and a package may stand where a function is meant (parallelize); autodoc looks at attributes.
for _name in hydra_parallelism.__all__:
    setattr(hydra_parallelism, _name, getattr(hydra_parallelism, _name))

project = "hydra-parallelism"
release = hydra_parallelism.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"hydra-parallelism {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
smartquotes = False  # messages are shown as they are
html_copy_source = False
html_show_copyright = False
toc_object_entries_show_parents = "hide"
