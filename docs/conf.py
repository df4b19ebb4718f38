"""How Sphinx builds the documentation: `sphinx-build -W docs docs/_build/html`."""

project = "autopar"
copyright = "the authors of autopar"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "autopar"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them in the source; here it is kept short
autodoc_default_options = {"members": True}
