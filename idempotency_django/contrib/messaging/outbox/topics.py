"""The topics of ``IDEMPOTENCY["OUTBOX"]``: publisher, attempts, retention, and other settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ....conf import did_you_mean, is_duration, until_settings_change
from ..brokers import BROKERS
from ..brokers.base import Publisher
from ..conf import conf

ALL_OTHERS: Final = "*"
OWN: Final = {
    "after_commit": "idempotency_django.contrib.messaging.outbox.calls.CallPublisher",
    "celery": "celery",
}
"""The built-in topics, for messages that only these publishers can send."""

DEAD_LETTER: Final = "dead_letter"
DISCARD: Final = "discard"

_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic of the outbox.

    Attributes:
        name: letters, digits and ``_.-``.
        backend: the path of its publisher's class, or a name of ``BROKERS``.
        options: what the publisher is made with.
        source: the source of its events.
        max_attempts: how often the broker may refuse a message; ``None``: any number of times.
        on_poison: what happens to a message that was refused so often. ``"dead_letter"``: it
            is a dead letter, and its group waits, until an operator retries or discards it.
            ``"discard"``: it is discarded, and its group continues.
        retention: how long a message is kept after it was sent.
    """

    name: str
    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    max_attempts: int | None = 10
    on_poison: str = DEAD_LETTER
    retention: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        for wrong, what, wanted in (
            (
                not _TOPIC_NAME.fullmatch(self.name),
                self.name,
                "up to 100 letters, digits and '_.-'",
            ),
            (not (isinstance(self.backend, str) and self.backend), "BACKEND", "set, to a path"),
            (not isinstance(self.options, Mapping), "OPTIONS", "a dict"),
            (not isinstance(self.source, str), "SOURCE", "a URI reference, such as '/shop'"),
            (not _is_count(self.max_attempts), "MAX_ATTEMPTS", "1 or more, or None"),
            (
                self.on_poison not in (DEAD_LETTER, DISCARD),
                "ON_POISON",
                "'dead_letter' or 'discard'",
            ),
            (not is_duration(self.retention), "RETENTION", "a timedelta, 0 or more"),
        ):
            if wrong:
                raise ImproperlyConfigured(
                    f"The topic {self.name!r} in IDEMPOTENCY['OUTBOX'] is wrong: {what!r} must be "
                    f"{wanted}."
                )

    @property
    def is_local(self) -> bool:
        """Whether consumers of this project get its messages, from the relay."""
        return self.backend in ("local", BROKERS["local"].publisher)

    def publisher(self) -> Publisher:
        """A new publisher for the topic.

        Raises:
            ImproperlyConfigured: it cannot be made.
        """
        known = BROKERS.get(self.backend)
        path = known.publisher if known else self.backend
        if "." not in path:
            raise ImproperlyConfigured(
                f"The topic {self.name!r} has the unknown BACKEND {self.backend!r}. Use the path "
                "of a publisher, or a name. " + did_you_mean(self.backend, BROKERS, "Known names")
            )
        try:
            made = import_string(path)(self.name, **self.options)
        except ModuleNotFoundError as error:
            extra = "".join(each.extra for each in BROKERS.values() if each.publisher == path)
            what = f'Install "idempotency-django[{extra}]"' if extra else "Correct BACKEND"
            raise ImproperlyConfigured(
                f"The publisher {self.backend!r} of the topic {self.name!r} cannot be imported: "
                f"{error}. {what}."
            ) from error
        except (ImproperlyConfigured, ImportError, TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"The publisher {self.backend!r} of the topic {self.name!r} cannot be created: "
                f"{error}. Correct BACKEND and OPTIONS in IDEMPOTENCY['OUTBOX']."
            ) from error
        if not isinstance(made, Publisher):
            raise ImproperlyConfigured(
                f"The BACKEND {self.backend!r} of the topic {self.name!r} creates a "
                f"{type(made).__name__}, not a Publisher. Use a subclass of "
                "idempotency_django.contrib.messaging.Publisher."
            )
        if self.source:
            made.source = self.source
        return made


_SETTINGS: Final = {each.name.upper(): each.name for each in fields(Topic)[1:]}
"""The entries of a topic in the setting, and its attributes that they are."""


def topics() -> list[str]:
    """The names of all topics, without ``"*"``."""
    return [name for name in {**conf.outbox, **OWN} if name != ALL_OTHERS]


def has_topic(name: str) -> bool:
    """Whether a relay sends messages of that topic."""
    return name in topics() or ALL_OTHERS in conf.outbox


@until_settings_change
@lru_cache
def topic(name: str) -> Topic:
    """The topic of that name.

    Raises:
        ImproperlyConfigured: there is none, or it is wrong.
    """
    others = OWN.get(name, conf.outbox.get(ALL_OTHERS))
    entry = conf.outbox.get(name, others)
    if entry is None or name == ALL_OTHERS:
        raise ImproperlyConfigured(
            f"There is no topic {name!r} in IDEMPOTENCY['OUTBOX'], so the message would not be "
            "sent. Add the topic, or '*' for all other topics. "
            + did_you_mean(name, conf.outbox, "Known topics")
        )
    return _made(name, entry)


def _made(name: str, entry: Any) -> Topic:
    if isinstance(entry, str):
        return Topic(name=name, backend=entry)
    if not isinstance(entry, Mapping):
        raise ImproperlyConfigured(
            f"The topic {name!r} in IDEMPOTENCY['OUTBOX'] is {entry!r}; it must be the path of a "
            "publisher, or a dict with BACKEND."
        )
    for unknown in entry.keys() - _SETTINGS.keys():
        raise ImproperlyConfigured(
            f"The topic {name!r} in IDEMPOTENCY['OUTBOX'] has the unknown entry {unknown!r}. "
            + did_you_mean(unknown, _SETTINGS)
        )
    given = {_SETTINGS[key]: value for key, value in entry.items()}
    return Topic(**{"name": name, "backend": OWN.get(name, ""), **given})


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 1)
