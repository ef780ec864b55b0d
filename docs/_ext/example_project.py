"""The role ``example-project``: a link to a zip file of ``docs/project``, which the build makes."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from packed import pack
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

NAME = "shop.zip"


class Link(SphinxRole):
    """A link to the zip file, from any page."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        root = "../" * self.env.docname.count("/")
        return [nodes.reference(self.rawtext, self.text, refuri=root + NAME, internal=True)], []


def pack_with_pages(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        pack(Path(app.outdir) / NAME)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("example-project", Link())
    app.connect("build-finished", pack_with_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
