"""The check of the prose finds what it is for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import ROOT

TWENTY = " ".join(f"word{number}" for number in range(20))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("Nobody holds the lease.", "name the actor"),
        ("| State | Meaning |\n| --- | --- |\n| held | somebody settles it |\n", "name the actor"),
        (f"{TWENTY} {TWENTY}.", "40 words in one sentence"),
        (f"{TWENTY}. {TWENTY}.", "20.0 words a sentence on average"),
        ("The message is very unique.", "uncomparable"),
        ("The worker commits, and the lease ends.\n\n```python\n# nobody\n```\n", None),
    ],
    ids=["actor", "table", "long", "average", "proselint", "code"],
)
def test_finding(tmp_path: Path, text: str, finding: str | None) -> None:
    """Each kind of finding fails the check, and good prose passes it."""
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{text}\n")
    command = [sys.executable, str(ROOT / "docs" / "prose.py"), str(page)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == (finding is not None), checked.stdout + checked.stderr
    assert (finding or "0 findings") in checked.stdout


def test_package(tmp_path: Path) -> None:
    """The docstrings and texts of a module are searched for words."""
    module = tmp_path / "module.py"
    module.write_text('"""Good."""\n\nERROR = f"It is {1} of somebody else."  # nobody\n')
    command = [sys.executable, str(ROOT / "docs" / "prose.py"), str(module)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "module.py:3: “somebody”" in checked.stdout
    assert "1 files, 1 findings" in checked.stdout
