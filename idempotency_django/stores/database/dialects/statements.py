"""The SQL of a database: named and described templates, in one file for each vendor.

They are composed once per store from the model's own metadata, as Django's database cache backend
does: building them through the ORM for each request would take longer than running them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from ....models import STEPS_INDEX, IdempotencyKey, IdempotencyStep

Parameters = Mapping[str, Any]
"""The parameters of a statement, by name."""

# A name on a line of its own, what it does as comments, and the statement up to the next name.
_TEMPLATE = re.compile(r"^-- (\w+) --\n((?:--.*\n)+)((?:(?!-- ).*\n?)+)", re.MULTILINE)


@cache
def templates(vendor: str) -> Mapping[str, str]:
    """The templates in the file of a vendor, by name."""
    text = (resources.files(__package__) / "sql" / f"{vendor}.sql").read_text("utf-8")
    return {name: statement.strip() for name, _, statement in _TEMPLATE.findall(text)}


def statements(vendor: str, quote: Callable[[str], str]) -> Mapping[str, str]:
    """The statements of a vendor, by name.

    Args:
        vendor: the kind of database, by Django's name.
        quote: quotes the name of a table or column.
    """
    return {name: text.format(**names(quote)) for name, text in templates(vendor).items()}


def names(quote: Callable[[str], str]) -> Mapping[str, str]:
    """The names of tables and columns that stand in the templates, quoted."""
    return {
        "table": quote(IdempotencyKey._meta.db_table),
        "steps": quote(IdempotencyStep._meta.db_table),
        "steps_index": quote(STEPS_INDEX),
        **{field.name: quote(str(field.column)) for field in IdempotencyKey._meta.concrete_fields},
        **{
            f"step_{field.name}": quote(str(field.column))
            for field in IdempotencyStep._meta.concrete_fields
        },
    }
