"""Sizes of what lasts long: small for ``make test``, large for ``make nightly``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from django.conf import settings


def nightly(*values: Any) -> Any:
    """Parameters of a test that only ``make nightly`` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def sizes(few: int, many: int, variable: str = "") -> list[Any]:
    """How many ``make test`` takes, and how many ``make nightly``, unless a variable says so."""
    return [few, nightly(int(os.environ.get(variable, many)))]


def first_database(name: str, *, indirect: bool = True) -> Any:
    """Runs a test on the first database; ``make nightly`` runs it on the others.

    For what is above the database: it does the same on each, and few tests of it on all are enough.

    Args:
        name: of the parameter that is the name of a database.
        indirect: it is a fixture that has these names as its parameters.
    """
    first, *others = settings.ALIASES
    return pytest.mark.parametrize(name, [first, *map(nightly, others)], indirect=indirect)


def few(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The first of these parameters; the others are for ``make nightly``."""
    taken = list(values)
    return [*taken[:count], *map(nightly, taken[count:])]
