"""The stores by alias, as in ``CACHES``: ``stores["default"]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..conf import conf, did_you_mean
from .base import Store

__all__ = ["Store", "stores"]


class Stores:
    """Makes each store once, at its first use, from ``IDEMPOTENCY["STORES"]``.

    All threads share a store.

    Attributes:
        made: the stores that were used so far, by alias.
    """

    def __init__(self) -> None:
        self.made: dict[str, Store] = {}

    def __getitem__(self, alias: str) -> Store:
        # Two threads that ask for it at once get the same.
        return self.made.get(alias) or self.made.setdefault(alias, _make(alias))

    def __iter__(self) -> Iterator[str]:
        return iter(conf.stores)

    def all(self) -> list[Store]:
        """Every configured store."""
        return [self[alias] for alias in self]


def _make(alias: str) -> Store:
    if alias not in conf.stores:
        hint = did_you_mean(alias, conf.stores)
        raise ImproperlyConfigured(f"IDEMPOTENCY['STORES'] has no store {alias!r}. {hint}")
    declared: Any = conf.stores[alias]
    where = f"IDEMPOTENCY['STORES'][{alias!r}]"
    names = set(declared) if isinstance(declared, Mapping) else set()
    if not {"BACKEND"} <= names <= {"BACKEND", "OPTIONS"}:
        raise ImproperlyConfigured(
            f"{where} is {declared!r}; it must be a dict with 'BACKEND' (the path of a store "
            "class) and, optionally, 'OPTIONS' (a dict of its arguments)."
        )
    try:
        store = import_string(declared["BACKEND"])(alias, **declared.get("OPTIONS", {}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{where} cannot be created: {error}.") from error
    if not isinstance(store, Store):
        raise ImproperlyConfigured(
            f"{where} is no subclass of idempotency_django.stores.Store: {declared['BACKEND']!r}."
        )
    return store


stores = Stores()


def _forget_stores(*, setting: str, **_: Any) -> None:
    if setting in ("IDEMPOTENCY", "DATABASES"):
        stores.made.clear()


setting_changed.connect(_forget_stores, dispatch_uid="idempotency_django.stores")
