"""The topics of ``IDEMPOTENCY["OUTBOX"]``: publisher, attempts and retention; and their check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ....conf import did_you_mean, is_duration, until_settings_change
from ....stores import stores
from ..brokers.base import Publisher
from ..conf import conf
from ..databases import database

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
    "after_commit": {
        "BACKEND": "local",
        "OPTIONS": {"consumers": [f"{_MESSAGING}.outbox.calls.CALLS"]},
    },
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
        for is_right, what, wanted in (
            (_TOPIC_NAME.fullmatch(self.name), self.name, "up to 100 letters, digits and '_.-'"),
            (is_count, "MAX_ATTEMPTS", "1 or more"),
            (is_duration(self.retention), "RETENTION", "a timedelta, 0 or more"),
        ):
            if not is_right:
                raise ValueError(f"{what!r} must be {wanted}")

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
    try:
        entry = {**OWN.get(name, {}), **known[name]}
        return Topic(name=name, **{key.lower(): value for key, value in entry.items()})
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(
            f"The topic {name!r} in IDEMPOTENCY['OUTBOX'] is wrong: {error}. It is a dict with "
            "BACKEND and, where they are needed, OPTIONS, MAX_ATTEMPTS and RETENTION."
        ) from error


def check_outbox(**_: Any) -> Iterator[CheckMessage]:
    """The topics of the outbox, and the database that it is in."""
    try:
        names, using = [*conf.outbox], database()
        keeping = {store.using for store in stores.all() if store.using}
    except ImproperlyConfigured:
        return  # another check reports it
    for name in names:
        try:
            topic(name).publisher()
        except ImproperlyConfigured as error:
            yield Error(str(error), id="idempotency_django.E043")
    if names and keeping and using not in keeping:
        yield Warning(
            f"Messages are in the database {using!r}, but records are in "
            f"{', '.join(map(repr, sorted(keeping)))}.",
            hint=(
                "An effect, its record and its messages commit together only in one database. Use "
                "the same alias for IDEMPOTENCY['MESSAGING_DATABASE'] and the store's using."
            ),
            id="idempotency_django.W007",
        )
