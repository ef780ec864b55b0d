"""What browsers let scripts of other origins send and read, according to django-cors-headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.conf import settings
from django.core.checks import WARNING, CheckMessage
from django.core.exceptions import ImproperlyConfigured

from ..conf import conf

CORS = "corsheaders.middleware.CorsMiddleware"


def check_cors(**_: Any) -> Iterator[CheckMessage]:
    """Whether a script of another origin may send a key and read the headers of a replay."""
    if CORS not in settings.MIDDLEWARE:
        return
    try:
        header, marks = conf.header, [conf.replayed_header, "Retry-After"]
    except ImproperlyConfigured:
        return  # check_settings reports it
    if _left_out([header], "CORS_ALLOW_HEADERS"):
        yield CheckMessage(
            WARNING,
            f"{header!r} is not in CORS_ALLOW_HEADERS. Browsers block every request from another "
            "origin that has a key.",
            hint="from corsheaders.defaults import default_headers; "
            f"CORS_ALLOW_HEADERS = (*default_headers, {header.lower()!r})",
            id="idempotency_django.W029",
        )
    hidden = _left_out(marks, "CORS_EXPOSE_HEADERS")
    if hidden:
        named = ", ".join(map(repr, hidden))
        yield CheckMessage(
            WARNING,
            f"{named} {'are' if len(hidden) > 1 else 'is'} not in CORS_EXPOSE_HEADERS. Scripts of "
            "other origins cannot see that an answer is a replay, or when to retry.",
            hint=f"CORS_EXPOSE_HEADERS = {tuple(marks)!r}",
            id="idempotency_django.W030",
        )


def _left_out(headers: Iterable[str], setting: str) -> list[str]:
    """Those of the headers that the setting of django-cors-headers does not name."""
    named = {str(name).lower() for name in getattr(settings, setting, ())}
    # To a browser, "*" stands for every header, but in requests with credentials for itself.
    if "*" in named and not getattr(settings, "CORS_ALLOW_CREDENTIALS", False):
        return []
    return [header for header in headers if header.lower() not in named]
