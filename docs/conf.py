"""Sphinx's settings to build the site of docs/ (`make site`), and to check the links of all Markdown (`make check`).

With the tag `links` the whole repository is read, so that links between README.md, docs/ and the charts are checked
both ways, anchors too; nothing is written. Both treat warnings as errors.
"""

from pathlib import Path

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "Enginesmith"
author = "The authors of Enginesmith"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False
exclude_patterns = [".*", "build", "tests/charts/golden", "**/node_modules"]
include_patterns = ["*.md", "**/*.md"]
if tags.has("links"):  # type: ignore[name-defined]  # noqa: F821 - Sphinx gives it
    root_doc = "README"
    suppress_warnings = ["toc.not_included"]


class LinksOut(SphinxPostTransform):
    """Replaces links to folders by their text, and on the site also links to pages that the site does not contain.

    Runs before MyST resolves the other links, and warns about broken ones.
    """

    default_priority = 8

    def run(self, **_: object) -> None:
        """Replace the links of one page."""
        for link in list(self.document.findall(pending_xref)):
            target = str(link["reftarget"]).partition("#")[0]
            place = ((Path(self.app.srcdir) / self.env.docname).parent / target).resolve()
            is_page = not place.is_relative_to(self.app.srcdir) and place.with_name(f"{place.name}.md").exists()
            if target and (place.is_dir() or is_page):
                link.replace_self(link[0])


def setup(app: Sphinx) -> None:
    """Register the transform; Sphinx calls this function."""
    app.add_post_transform(LinksOut)
