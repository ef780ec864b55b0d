"""The sequence diagrams are drawn, with all that their text says."""

from __future__ import annotations

import importlib.util
import re
from html import unescape
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.examples import ROOT

PAGE = ROOT / "docs" / "background" / "what-happens.md"
SOURCES = re.findall(r"```\{sequence\}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def drawn() -> ModuleType:
    """What the documentation's build draws with."""
    spec = importlib.util.spec_from_file_location("drawn", ROOT / "docs" / "_ext" / "drawn.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", SOURCES)
def test_drawn(source: str) -> None:
    """Each line of a diagram is in it, within its borders."""
    svg = drawn().drawing(source)
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = [element for element in root.iter() if element.tag.endswith("}text")]
    said = {re.sub(r"^(\w+ \S+ \w+: |\w+: |= )", "", line) for line in source.splitlines()[1:]}
    assert {unescape(element.text or "") for element in texts} >= {
        line for line in said if not line.endswith(" dies")
    }
    assert all(0 < float(element.attrib["x"]) < width for element in texts)
    assert all(0 < float(element.attrib["y"]) < height for element in texts)


@pytest.mark.parametrize("line", ["Client => Worker: POST", "Client -> Nobody: POST", "nonsense"])
def test_refused(line: str) -> None:
    """A line that cannot be drawn fails the build, and is named."""
    with pytest.raises(ValueError, match=re.escape(line)):
        drawn().drawing(f"actors: Client, Worker\n{line}")
