"""The example project as a zip file."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import zipfile
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "project"


def pack(archive: Path) -> None:
    """Write the project's files into a zip file, in a folder ``shop``; the same bytes each time."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(PROJECT.rglob("*.py")):
            name = Path("shop") / file.relative_to(PROJECT)
            packed.writestr(zipfile.ZipInfo(name.as_posix()), file.read_bytes())
