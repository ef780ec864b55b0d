"""The stores by alias, as in ``CACHES``: ``stores["default"]``."""

from __future__ import annotations

import difflib
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..conf import conf
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
        self._lock = threading.Lock()

    def __getitem__(self, alias: str) -> Store:
        store = self.made.get(alias)
        if store is None:
            with self._lock:
                store = self.made.get(alias) or self._make(alias)
                self.made[alias] = store
        return store

    def __iter__(self) -> Iterator[str]:
        return iter(conf.stores)

    def all(self) -> list[Store]:
        """Every configured store."""
        return [self[alias] for alias in self]

    def forget(self) -> None:
        """Make the stores again at their next use."""
        self.made.clear()

    def _make(self, alias: str) -> Store:
        configured = conf.stores
        if alias not in configured:
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['STORES'] has no store {alias!r}.{_did_you_mean(alias, configured)} "
                f"It has: {', '.join(map(repr, configured)) or 'none'}."
            )
        declared = configured[alias]
        where = f"IDEMPOTENCY['STORES'][{alias!r}]"
        options = declared.get("OPTIONS", {}) if isinstance(declared, Mapping) else None
        if not isinstance(options, Mapping):
            raise ImproperlyConfigured(
                f"{where} is {declared!r}; it must be a dict with 'BACKEND' (the path of a store "
                "class) and, optionally, 'OPTIONS' (a dict of its arguments)."
            )
        _refuse_unknown(declared, ("BACKEND", "OPTIONS"), where)
        backend = self._imported(alias, declared.get("BACKEND"))
        taken = _options_of(backend)
        if taken is not None:
            _refuse_unknown(options, taken, f"{where}['OPTIONS']")
        try:
            return backend(alias, **options)
        except TypeError as error:
            raise ImproperlyConfigured(f"{where} cannot be created: {error}.") from error

    def _imported(self, alias: str, path: Any) -> type[Store]:
        try:
            backend = import_string(path)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['STORES'][{alias!r}]['BACKEND'] is {path!r}, which cannot be "
                f"imported: {error}."
            ) from error
        if not (isinstance(backend, type) and issubclass(backend, Store)):
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['STORES'][{alias!r}]['BACKEND'] is {path!r}, which is not a "
                "subclass of idempotency_django.stores.Store."
            )
        return backend


def _options_of(backend: type[Store]) -> Sequence[str] | None:
    """The names of the options that a store takes; ``None``: any."""
    parameters = list(inspect.signature(backend).parameters.values())
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters[1:]]  # the first is the alias


def _refuse_unknown(given: Iterable[Any], taken: Sequence[str], where: str) -> None:
    unknown = [name for name in given if name not in taken]
    if unknown:
        named = ", ".join(map(repr, unknown))
        hints = "".join(_did_you_mean(str(name), taken) for name in unknown)
        takes = ", ".join(map(repr, taken)) or "none"
        raise ImproperlyConfigured(
            f"{where} has unknown entries: {named}.{hints} It takes {takes}."
        )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


stores = Stores()


def _forget_stores(*, setting: str, **_: Any) -> None:
    if setting in ("IDEMPOTENCY", "DATABASES"):
        stores.forget()


setting_changed.connect(_forget_stores, dispatch_uid="idempotency_django.stores")
