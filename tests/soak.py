"""Sizes of what lasts long: small for ``make test``, large for ``make soak``."""

from __future__ import annotations

import os
from typing import Any

import pytest


def soak(*values: Any) -> Any:
    """Parameters of a test that only ``make soak`` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


def sizes(few: int, many: int, variable: str = "") -> list[Any]:
    """How many ``make test`` takes, and how many ``make soak``, unless a variable says so."""
    return [few, soak(int(os.environ.get(variable, many)))]
