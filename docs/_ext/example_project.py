"""The role ``example-project``: a link to a zip file of ``docs/project``, which the build makes."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import zipfile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

PROJECT = Path(__file__).parents[1] / "project"
NAME = "shop.zip"


def pack(archive: Path) -> None:
    """Write the project's files into a zip file, in a folder ``shop``; the same bytes each time."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(PROJECT.rglob("*.py")):
            name = Path("shop") / file.relative_to(PROJECT)
            packed.writestr(zipfile.ZipInfo(name.as_posix()), file.read_bytes())


class Link(SphinxRole):
    """A link to the zip file, from any page."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        root = "../" * self.env.docname.count("/")
        return [nodes.reference(self.rawtext, self.text, refuri=root + NAME)], []


def pack_with_pages(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        pack(Path(app.outdir) / NAME)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("example-project", Link())
    app.connect("build-finished", pack_with_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
