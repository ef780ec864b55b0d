"""What all parts of a run have shown: ``python -m tests.support.summary FOLDER``, with reports.

Fails if a promise of the guarantees has no test that passed in any part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.docs.promises import PROMISES

SLOWEST = 8


def untested(passed: set[str]) -> list[str]:
    """The promises of which no test is among these."""
    return [sentence for sentence, tests in PROMISES.items() if not passed.intersection(tests)]


def main(folder: Path) -> int:
    """Write a line for each part, the slowest tests, and at the end what is wrong."""
    reports: dict[str, dict[str, Any]] = {
        path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
    }
    print(f"\n{'part':16} {'wall':>6} {'CPU':>6}")
    for part, report in reports.items():
        counts = ", ".join(
            f"{count} {what}" for what, count in report["counts"].items() if what != "deselected"
        )
        print(f"{part:16} {report['seconds']:4.0f} s {report['cpu']:4.0f} s  {counts}")
    print(f"{'all':23} {sum(report['cpu'] for report in reports.values()):4.0f} s")
    durations = [(seconds, name) for each in reports.values() for name, seconds in each["slowest"]]
    print("\nThe slowest tests:")
    for seconds, name in sorted(durations, reverse=True)[:SLOWEST]:
        print(f"{seconds:6.1f} s  {name}")
    wrong = [f"FAILED {name}" for report in reports.values() for name in report["failed"]]
    missing = untested({name for report in reports.values() for name in report["passed"]})
    wrong += [f"No test of this promise has passed: {sentence}" for sentence in missing]
    print("", *wrong or [f"Each of {len(PROMISES)} promises has a test that passed."], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
