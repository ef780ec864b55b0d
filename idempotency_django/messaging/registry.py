"""The consumers of the project, by name: for what runs outside the code that declares them."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import conf
from .consumers import Consumer


def consumers() -> dict[str, Consumer]:
    """The consumers that ``IDEMPOTENCY["CONSUMERS"]`` lists, by name.

    Raises:
        ImproperlyConfigured: a path leads to no consumer, or two have one name.
    """
    found: dict[str, Consumer] = {}
    for path in conf.consumers:
        consumer = consumer_at(path)
        if found.setdefault(consumer.name, consumer) is not consumer:
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['CONSUMERS'] lists two consumers that are called {consumer.name!r}. "
                "Give one of them another name."
            )
    return found


def consumer_at(path: str) -> Consumer:
    """The consumer at a path such as ``"shop.consumers.billing"``, or ``"shop.consumers:billing"``.

    Raises:
        ImproperlyConfigured: the path leads to no consumer.
    """
    try:
        consumer = import_string(path.replace(":", "."))
    except ImportError as error:
        raise ImproperlyConfigured(
            f"There is no consumer at {path!r}: {error}. Name the module and the consumer in it, "
            "such as 'shop.consumers.billing'."
        ) from error
    if not isinstance(consumer, Consumer):
        raise ImproperlyConfigured(
            f"{path!r} is a {type(consumer).__name__}, not a Consumer. Name the module and the "
            "consumer in it, such as 'shop.consumers.billing'."
        )
    return consumer
