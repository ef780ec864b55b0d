"""Makes links to the published documentation links within this build of it.

The README is read elsewhere, too, so its links are absolute; parts of it are included here.
"""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PUBLISHED = "https://idempotency-django.readthedocs.io/"

logger = logging.getLogger(__name__)


def make_local(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for reference in doctree.findall(nodes.reference):
        target = reference.get("refuri", "")
        if not target.startswith(PUBLISHED):
            continue
        path, mark, section = target.removeprefix(PUBLISHED).partition("#")
        page = path or "index"
        if page in app.env.found_docs:
            reference["refuri"] = app.builder.get_relative_uri(docname, page) + mark + section
        else:
            logger.warning("There is no page %s", target, location=reference)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", make_local)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
