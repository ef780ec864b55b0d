"""The topics of ``IDEMPOTENCY["OUTBOX"]``: publisher, attempts and retention."""

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
from ..brokers.base import Publisher
from ..conf import conf

_MESSAGING: Final = "idempotency_django.contrib.messaging"
PUBLISHERS: Final = {
    "celery": f"{_MESSAGING}.CeleryPublisher",
    "http": f"{_MESSAGING}.HttpPublisher",
    "kafka": f"{_MESSAGING}.KafkaPublisher",
    "kombu": f"{_MESSAGING}.KombuPublisher",
    "local": f"{_MESSAGING}.LocalPublisher",
}
"""The publishers of this package, by the names that ``BACKEND`` takes."""
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "after_commit": {"BACKEND": f"{_MESSAGING}.outbox.calls.CallPublisher"},
    "celery": {"BACKEND": "celery"},
}
"""The built-in topics, for messages that only these publishers can send."""

_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic of the outbox.

    Attributes:
        name: letters, digits and ``_.-``.
        backend: the path of its publisher's class, or a name of ``PUBLISHERS``.
        options: what the publisher is made with.
        max_attempts: how often the broker may refuse a message. Then it is a dead letter, and its
            group waits, until an operator retries or discards it.
        retention: how long a message is kept after it was sent.
    """

    name: str
    backend: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    max_attempts: int = 10
    retention: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        is_count = type(self.max_attempts) is int and self.max_attempts >= 1
        is_path = isinstance(self.backend, str) and self.backend
        for is_right, what, wanted in (
            (_TOPIC_NAME.fullmatch(self.name), self.name, "up to 100 letters, digits and '_.-'"),
            (is_path, "BACKEND", "set, to a path"),
            (isinstance(self.options, Mapping), "OPTIONS", "a dict"),
            (is_count, "MAX_ATTEMPTS", "1 or more"),
            (is_duration(self.retention), "RETENTION", "a timedelta, 0 or more"),
        ):
            if not is_right:
                raise ImproperlyConfigured(
                    f"The topic {self.name!r} in IDEMPOTENCY['OUTBOX'] is wrong: {what!r} must be "
                    f"{wanted}."
                )

    @property
    def path(self) -> str:
        """The path of its publisher's class."""
        return PUBLISHERS.get(self.backend, self.backend)

    def publisher(self) -> Publisher:
        """A new publisher for the topic.

        Raises:
            ImproperlyConfigured: it cannot be made.
        """
        try:
            made: Publisher = import_string(self.path)(self.name, **self.options)
        except (ImproperlyConfigured, ImportError, TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"The publisher {self.backend!r} of the topic {self.name!r} cannot be created: "
                f"{error}. Correct BACKEND and OPTIONS in IDEMPOTENCY['OUTBOX']."
            ) from error
        return made


_SETTINGS: Final = {each.name.upper(): each.name for each in fields(Topic)[1:]}
"""The entries of a topic in the setting, and its attributes that they are."""


def topics() -> dict[str, Any]:
    """The entries of all topics, by name."""
    return {**OWN, **conf.outbox}


@until_settings_change
@lru_cache
def topic(name: str) -> Topic:
    """The topic of that name.

    Raises:
        ImproperlyConfigured: there is none, or it is wrong.
    """
    known = topics()
    if name not in known:
        raise ImproperlyConfigured(
            f"There is no topic {name!r} in IDEMPOTENCY['OUTBOX'], so the message would not be "
            f"sent. Add the topic. {did_you_mean(name, conf.outbox, 'Known topics')}"
        )
    entry = known[name]
    if not isinstance(entry, Mapping):
        raise ImproperlyConfigured(
            f"The topic {name!r} in IDEMPOTENCY['OUTBOX'] is {entry!r}; it must be a dict with "
            "BACKEND, the path of a publisher."
        )
    given = {**OWN.get(name, {}), **entry}
    for unknown in given.keys() - _SETTINGS.keys():
        raise ImproperlyConfigured(
            f"The topic {name!r} in IDEMPOTENCY['OUTBOX'] has the unknown entry {unknown!r}. "
            + did_you_mean(unknown, _SETTINGS)
        )
    return Topic(name=name, **{_SETTINGS[key]: value for key, value in given.items()})
