"""The ``IDEMPOTENCY`` setting: one live property for each of the core's names in it.

Nothing is read at import. A value is read and checked at its first use, and again after Django's
``setting_changed``, so ``override_settings`` works. The system checks (``manage.py check``)
report a wrong value. Code that uses it raises
:exc:`~django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import _lru_cache_wrapper, cached_property
from typing import Any, Final, TypeGuard, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .errors import all_errors

DEFAULT_STORES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}
}

NOTHING: Final[Mapping[str, Any]] = {}

MIDDLEWARE: Final = "idempotency_django.middleware.IdempotencyMiddleware"

ALL_UNSAFE: Final = "unsafe"
WITH_POLICY: Final = "with-policy"

_HOOKS: Final = "a list of the dotted paths of functions, such as ['shop.observing.span']"

_FIELD_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.1


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "Known names") -> str:
    """A hint for a name that does not exist.

    Args:
        name: what was written.
        known: the names that exist.
        otherwise: what introduces the list of all of them if none is similar.
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = ", ".join(names) or "none"
    return f"Did you mean {close[0]!r}?" if close else f"{otherwise}: {listed}."


def seconds_of(name: str, value: object) -> float:
    """The seconds of an option that is a duration.

    Args:
        name: the option.
        value: its value.

    Raises:
        ImproperlyConfigured: it is no ``timedelta`` above 0.
    """
    if is_duration(value) and value:
        return value.total_seconds()
    raise ImproperlyConfigured(
        f"{name} is {value!r}; it must be a timedelta, such as timedelta(seconds=10)."
    )


def is_duration(value: object, longest: timedelta = timedelta.max) -> TypeGuard[timedelta]:
    """Whether it is a ``timedelta`` from 0 to the longest one."""
    return isinstance(value, timedelta) and timedelta(0) <= value <= longest


_T = TypeVar("_T")


def setting(
    name: str, default: _T, expected: str, holds: Callable[[Any], bool]
) -> cached_property[_T]:
    """Make a property of a name in ``IDEMPOTENCY``.

    Args:
        name: the name.
        default: its value where the project does not set it.
        expected: what its value must be, for the error.
        holds: whether a value is that.
    """

    def read(settings: Settings) -> _T:
        value: _T = settings.raw.get(name, default)
        if value is default or holds(value):
            return value
        raise _refused(name, value, expected)

    return cached_property(read)


def _refused(name: str, value: object, expected: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"IDEMPOTENCY[{name!r}] is {value!r}; it must be {expected}.")


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_header(value: Any) -> bool:
    return isinstance(value, str) and _FIELD_NAME.fullmatch(value) is not None


def _chooses_views(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_prefix_or_namespace, value))
    return value in (ALL_UNSAFE, WITH_POLICY)


def _is_prefix_or_namespace(value: Any) -> bool:
    if not is_text(value) or value in (ALL_UNSAFE, WITH_POLICY):
        return False
    return value.startswith("/") or "/" not in value  # "api/" is a prefix without its first slash


_instances: Final[list[Settings]] = []


class Settings:
    """Reads ``settings.IDEMPOTENCY`` at the first access to each of its names.

    A request asks for several of them, so what was read is kept until a setting changes. Each
    property raises :exc:`~django.core.exceptions.ImproperlyConfigured` if its value is wrong.
    A package outside the core reads its own names with a subclass.
    """

    def __init__(self) -> None:
        _instances.append(self)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names in ``IDEMPOTENCY`` that can be read here."""
        read = {name: value for each in cls.__mro__ for name, value in vars(each).items()}
        properties = {name for name, value in read.items() if isinstance(value, cached_property)}
        return frozenset(name.upper() for name in properties - {"raw"})

    @cached_property
    def raw(self) -> Mapping[str, Any]:
        """The setting as it was written."""
        value = getattr(django_settings, "IDEMPOTENCY", NOTHING)
        if not isinstance(value, Mapping):
            raise ImproperlyConfigured(
                f"The IDEMPOTENCY setting must be a dict, not {type(value).__name__}."
            )
        return value

    stores: cached_property[Mapping[str, Mapping[str, Any]]] = setting(
        "STORES",
        DEFAULT_STORES,
        "a dict of stores by alias",
        lambda value: isinstance(value, Mapping),
    )
    """The stores by alias, each ``{"BACKEND": path, "OPTIONS": {…}}``."""

    @cached_property
    def policy(self) -> Any:
        """The project's :class:`~idempotency_django.policy.Policy`, or a dict of its fields."""
        return self.raw.get("POLICY", NOTHING)

    header = setting("HEADER", "Idempotency-Key", "the name of an HTTP header", _is_header)
    """The request header that carries the key."""

    record_replays = setting(
        "RECORD_REPLAYS", True, "True or False", lambda value: isinstance(value, bool)
    )
    """Whether replays are counted in the record, with one more statement each."""

    retry_after = setting(
        "RETRY_AFTER",
        timedelta(seconds=1),
        "a timedelta, such as timedelta(seconds=1)",
        is_duration,
    )
    """The ``Retry-After`` of the 409 while an operation is in progress."""

    @cached_property
    def status_codes(self) -> Mapping[str, int]:
        """HTTP statuses by the slug of the error, if they differ from the error's own."""
        value = self.raw.get("STATUS_CODES", NOTHING)
        if not isinstance(value, Mapping):
            raise _refused("STATUS_CODES", value, "a dict of status codes by slug")
        slugs = {error.slug for error in all_errors()}
        for slug, status in value.items():
            if slug not in slugs:
                known = ", ".join(sorted(slugs))
                raise _refused("STATUS_CODES", value, f"a dict with keys from {known}")
            if not (isinstance(status, int) and 400 <= status <= 599):
                raise ImproperlyConfigured(
                    f"IDEMPOTENCY['STATUS_CODES'][{slug!r}] is {status!r}; it must be an error "
                    "status, 400 to 599."
                )
        return value

    dialect = setting(
        "DIALECT",
        "ietf",
        "'ietf' or 'stripe'",
        lambda value: isinstance(value, str) and value in ("ietf", "stripe"),
    )
    """What a refusal looks like: a problem (RFC 9457), or an error that Stripe's clients
    understand."""

    docs_url = setting(
        "DOCS_URL",
        "https://idempotency-django.readthedocs.io/problems/#",
        "a URL",
        lambda value: isinstance(value, str),
    )
    """The URL that problem types link to; the slug of the problem is appended."""

    middleware_protects: cached_property[str | Sequence[str]] = setting(
        "MIDDLEWARE_PROTECTS",
        ALL_UNSAFE,
        f"{ALL_UNSAFE!r} (every view), {WITH_POLICY!r} (views that declare a policy), or a list of "
        "path prefixes and URL namespaces, such as ['/api/', 'shop']",
        _chooses_views,
    )
    """What the middleware protects beside views that declare a policy."""

    @cached_property
    def around_execution(self) -> tuple[Callable[..., AbstractContextManager[Any]], ...]:
        """What makes the context managers around every execution, the outermost first."""
        value = self.raw.get("AROUND_EXECUTION", ())
        if not isinstance(value, list | tuple):
            raise _refused("AROUND_EXECUTION", value, _HOOKS)
        hooks = []
        for path in value:
            try:
                hook = import_string(path) if isinstance(path, str) else path
            except ImportError as error:
                raise ImproperlyConfigured(
                    f"IDEMPOTENCY['AROUND_EXECUTION'] lists {path!r}, which cannot be imported: "
                    f"{error}"
                ) from error
            if not callable(hook):
                raise _refused("AROUND_EXECUTION", value, _HOOKS)
            hooks.append(hook)
        return tuple(hooks)


conf = Settings()


def _forget(**_: Any) -> None:
    for settings in _instances:
        vars(settings).clear()  # the values of cached_property


setting_changed.connect(_forget, dispatch_uid="idempotency_django.conf")


def until_settings_change(cached: _lru_cache_wrapper[_T]) -> _lru_cache_wrapper[_T]:
    """Decorates a cached function of the settings: a change of them empties the cache."""

    def forget(**_: Any) -> None:
        cached.cache_clear()

    uid = f"{cached.__module__}.{cached.__qualname__}"
    setting_changed.connect(forget, weak=False, dispatch_uid=uid)
    return cached


def default_store() -> str:
    """The alias of the store if no policy names one: the only one, else ``"default"``.

    There may be several stores and no ``"default"`` among them.
    """
    declared = conf.raw.get("STORES", DEFAULT_STORES)
    if isinstance(declared, Mapping) and len(declared) == 1:
        return str(next(iter(declared)))
    return "default"
