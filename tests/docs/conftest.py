"""Makes the documentation's project importable, as ``shop``, before its tables are made."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import shop.models  # noqa: F401  # before the test databases are made
