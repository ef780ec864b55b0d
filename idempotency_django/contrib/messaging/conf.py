"""The names in ``IDEMPOTENCY`` that only messaging reads, beside those of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from ...conf import NOTHING, Settings, is_text, setting


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_text, value))


class MessagingSettings(Settings):
    """Reads the names of messaging, and those of the core."""

    consumers: cached_property[Sequence[str]] = setting(
        "CONSUMERS",
        (),
        "a list of dotted paths, such as ['shop.consumers.billing']",
        _is_list_of_texts,
    )
    """The paths of the project's consumers, for the commands and tasks that run them."""

    outbox: cached_property[Mapping[str, Any]] = setting(
        "OUTBOX",
        NOTHING,
        "a dict of publishers by topic",
        lambda value: isinstance(value, Mapping),
    )
    """The publisher of each topic of the outbox, by topic."""

    messaging_database = setting(
        "MESSAGING_DATABASE", DEFAULT_DB_ALIAS, "an alias of DATABASES", is_text
    )
    """The alias of the database with the tables of messaging."""


conf = MessagingSettings()
