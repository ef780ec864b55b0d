"""The promises of the guarantees, and the tests that the page names for each."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "background" / "guarantees.md"
_PROMISE = re.compile(r"^- (.+(?:\n  (?!%).+)*)((?:\n  % .+)*)", re.MULTILINE)
PROMISES = {
    " ".join(sentence.split()): re.findall(r"% (.+)", tests)
    for sentence, tests in _PROMISE.findall(PAGE.read_text())
}
