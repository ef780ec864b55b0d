"""The ``IDEMPOTENCY`` setting: one live property for each of its names.

Nothing is read at import. A value is read and checked at its first use, and again after Django's
``setting_changed``, so ``override_settings`` just works. The system checks (``manage.py check``)
report a wrong value. Code that uses it raises
:exc:`~django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Final, NoReturn

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from .errors import all_errors

DEFAULT_STORES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}
}

DEFAULT_CREDENTIAL_HEADERS: Final = ["Authorization", "X-Api-Key", "X-Auth-Token"]

_NOTHING: Final[Mapping[str, Any]] = {}

NAMES: Final = frozenset(
    {
        "AROUND_EXECUTION",
        "CONSUMERS",
        "CREDENTIAL_COOKIES",
        "CREDENTIAL_HEADERS",
        "DOCS_URL",
        "HEADER",
        "MESSAGING_DATABASE",
        "MIDDLEWARE_EXEMPT",
        "MIDDLEWARE_PROTECTS",
        "OUTBOX",
        "POLICY",
        "REPLAYED_HEADER",
        "STATUS_CODES",
        "STATUS_VIEW",
        "STORES",
    }
)
"""Every name that ``IDEMPOTENCY`` may hold; the system checks refuse others."""

MIDDLEWARE: Final = "idempotency_django.middleware.IdempotencyMiddleware"

_HOOKS: Final = "a list of the dotted paths of functions, such as ['shop.observing.span']"

ALL_UNSAFE: Final = "unsafe"
WITH_POLICY: Final = "with-policy"


_FIELD_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.1


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "Known names") -> str:
    """A hint for somebody who wrote a name that does not exist.

    Args:
        name: what was written.
        known: the names that exist.
        otherwise: what introduces the list of all of them if none is similar.
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = ", ".join(names) or "none"
    return f"Did you mean {close[0]!r}?" if close else f"{otherwise}: {listed}."


class Settings:
    """Reads ``settings.IDEMPOTENCY`` at the first access to each of its names.

    A request asks for several of them, so what was read is kept until a setting changes. Each
    property raises :exc:`~django.core.exceptions.ImproperlyConfigured` if its value is wrong.
    """

    @cached_property
    def raw(self) -> Mapping[str, Any]:
        """The setting as it was written."""
        value = getattr(django_settings, "IDEMPOTENCY", _NOTHING)
        if not isinstance(value, Mapping):
            raise ImproperlyConfigured(
                f"The IDEMPOTENCY setting must be a dict, not {type(value).__name__}."
            )
        return value

    @cached_property
    def around_execution(self) -> tuple[Callable[..., AbstractContextManager[Any]], ...]:
        """The hooks around every execution, the outermost first."""
        value = self.raw.get("AROUND_EXECUTION", ())
        if isinstance(value, list | tuple):
            return tuple(self._hook(value, each) for each in value)
        return self._refuse("AROUND_EXECUTION", value, _HOOKS)

    def _hook(self, value: object, path: object) -> Callable[..., AbstractContextManager[Any]]:
        try:
            hook = import_string(path) if isinstance(path, str) else path
        except ImportError as error:
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['AROUND_EXECUTION'] lists {path!r}, which cannot be imported: {error}"
            ) from error
        if callable(hook):
            return hook  # type: ignore[no-any-return]
        return self._refuse("AROUND_EXECUTION", value, _HOOKS)

    @cached_property
    def consumers(self) -> Sequence[str]:
        """The paths of the project's consumers, for the commands and tasks that run them."""
        return self._paths("CONSUMERS", "['shop.consumers.billing']")

    @cached_property
    def credential_cookies(self) -> Sequence[str]:
        """The cookies that may tell callers apart if no principal is known."""
        value = self.raw.get("CREDENTIAL_COOKIES")
        if value is None:
            return [django_settings.SESSION_COOKIE_NAME]
        return self._names("CREDENTIAL_COOKIES", value, "cookies")

    @cached_property
    def credential_headers(self) -> Sequence[str]:
        """The headers that may tell callers apart if no principal is known."""
        value = self.raw.get("CREDENTIAL_HEADERS", DEFAULT_CREDENTIAL_HEADERS)
        return self._names("CREDENTIAL_HEADERS", value, "headers")

    @cached_property
    def docs_url(self) -> str:
        """The URL that problem types link to; the slug of the problem is appended."""
        value = self.raw.get("DOCS_URL", "https://idempotency-django.readthedocs.io/problems/")
        return value if isinstance(value, str) else self._refuse("DOCS_URL", value, "a URL")

    @cached_property
    def header(self) -> str:
        """The request header that carries the key."""
        return self._header("HEADER", "Idempotency-Key")

    @cached_property
    def messaging_database(self) -> str:
        """The alias of the database with the tables of messaging."""
        value = self.raw.get("MESSAGING_DATABASE", DEFAULT_DB_ALIAS)
        if isinstance(value, str) and value:
            return value
        return self._refuse("MESSAGING_DATABASE", value, "an alias of DATABASES")

    @cached_property
    def middleware_exempt(self) -> Sequence[str]:
        """The modules whose views the middleware leaves alone, including their submodules."""
        return self._paths("MIDDLEWARE_EXEMPT", "['ninja']")

    @cached_property
    def middleware_protects(self) -> str:
        """``"unsafe"``: every view called with an unsafe method; ``"with-policy"``: opt-in."""
        value = self.raw.get("MIDDLEWARE_PROTECTS", ALL_UNSAFE)
        if value in (ALL_UNSAFE, WITH_POLICY):
            return str(value)
        return self._refuse(
            "MIDDLEWARE_PROTECTS",
            value,
            f"{ALL_UNSAFE!r} (every view that is not exempt) or {WITH_POLICY!r} (views that have "
            "a policy)",
        )

    @cached_property
    def outbox(self) -> Mapping[str, Any]:
        """How each topic of the outbox is published, by topic."""
        value = self.raw.get("OUTBOX", _NOTHING)
        if isinstance(value, Mapping):
            return value
        return self._refuse("OUTBOX", value, "a dict of publishers by topic")

    @cached_property
    def policy(self) -> Any:
        """The project's :class:`~idempotency_django.policy.Policy`, or a dict of its fields."""
        return self.raw.get("POLICY", _NOTHING)

    @cached_property
    def replayed_header(self) -> str:
        """The response header that marks a replay."""
        return self._header("REPLAYED_HEADER", "Idempotent-Replayed")

    @cached_property
    def status_codes(self) -> Mapping[str, int]:
        """HTTP statuses by the slug of the error, if they differ from the error's own."""
        value = self.raw.get("STATUS_CODES", _NOTHING)
        if not isinstance(value, Mapping):
            self._refuse("STATUS_CODES", value, "a dict of status codes by slug")
        slugs = {error.slug for error in all_errors()}
        for slug, status in value.items():
            if slug not in slugs:
                self._refuse(
                    "STATUS_CODES", value, f"a dict with keys from {', '.join(sorted(slugs))}"
                )
            if not (isinstance(status, int) and 400 <= status <= 599):
                raise ImproperlyConfigured(
                    f"IDEMPOTENCY['STATUS_CODES'][{slug!r}] is {status!r}; it must be an error "
                    "status, 400 to 599."
                )
        return value

    @cached_property
    def status_view(self) -> str:
        """The name of the URL of the status view."""
        value = self.raw.get("STATUS_VIEW", "idempotency-status")
        if isinstance(value, str) and value:
            return value
        return self._refuse("STATUS_VIEW", value, "the name of a URL")

    @cached_property
    def stores(self) -> Mapping[str, Mapping[str, Any]]:
        """The stores by alias, each ``{"BACKEND": path, "OPTIONS": {…}}``."""
        value = self.raw.get("STORES", DEFAULT_STORES)
        if isinstance(value, Mapping):
            return value
        return self._refuse("STORES", value, "a dict of stores by alias")

    def _paths(self, name: str, example: str) -> Sequence[str]:
        value = self.raw.get(name, ())
        if isinstance(value, list | tuple) and all(
            isinstance(path, str) and path for path in value
        ):
            return value
        return self._refuse(name, value, f"a list of dotted paths, such as {example}")

    def _names(self, name: str, value: object, what: str) -> Sequence[str]:
        if value is DEFAULT_CREDENTIAL_HEADERS:
            return DEFAULT_CREDENTIAL_HEADERS
        if isinstance(value, list | tuple) and all(
            isinstance(item, str) and _FIELD_NAME.fullmatch(item) for item in value
        ):
            return value
        return self._refuse(name, value, f"a list of the names of {what}")

    def _header(self, name: str, default: str) -> str:
        value: object = self.raw.get(name, default)
        if value is default:
            return default
        if isinstance(value, str) and _FIELD_NAME.fullmatch(value):
            return value
        return self._refuse(name, value, "the name of an HTTP header")

    def _refuse(self, name: str, value: object, expected: str) -> NoReturn:
        raise ImproperlyConfigured(f"IDEMPOTENCY[{name!r}] is {value!r}; it must be {expected}.")


conf = Settings()


def _forget(**_: Any) -> None:
    vars(conf).clear()  # where cached_property keeps what it has read


setting_changed.connect(_forget, dispatch_uid="idempotency_django.conf")


def default_store() -> str:
    """The alias of the store if no policy names one: the only one, else ``"default"``.

    There may be several stores and no ``"default"`` among them.
    """
    declared = conf.raw.get("STORES", DEFAULT_STORES)
    if isinstance(declared, Mapping) and len(declared) == 1:
        return str(next(iter(declared)))
    return "default"
