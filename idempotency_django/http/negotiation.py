"""The form of an answer: which requests accept it, and what is made for one visitor only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.middleware import csrf

from ..errors import AnswerNotAcceptable
from ..records import Payload

_ANY_FORM: Final = (":accept", "*/*")
"""A note among the stored headers of an answer whose form did not depend on ``Accept``."""

GIVEN_OUT: Final = "CSRF_COOKIE_NEEDS_UPDATE"
"""Where Django notes in ``request.META`` that a CSRF token was given out or changed.

It is there from then on: true until the token's cookie is set, then false.
"""

_PAGES: Final = frozenset({"text/html", "application/xhtml+xml"})

_matches: Final[Callable[[str, str], bool]] = csrf._does_token_match  # type: ignore[attr-defined]
"""Django has no public name for it: whether a token, or a secret, is that of a secret."""

_LETTERS: Final = re.compile(rb"[A-Za-z0-9]{%d,}" % csrf.CSRF_SECRET_LENGTH)
"""What may hold a token, or the secret that it is made of."""


class GivenTokens:
    """Whether CSRF tokens were given out while the answer to a request was made.

    Args:
        request: the one that is answered.
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._given = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice those of the block, and none before it, as by a decorator around the view."""
        before = self._request.META.pop(GIVEN_OUT, False)
        try:
            yield
        finally:
            self._given = self._given or GIVEN_OUT in self._request.META
            if before:
                self._request.META[GIVEN_OUT] = True

    def are_in(self, response: HttpResponseBase) -> bool:
        """Whether an answer that was made in such blocks holds this visitor's token.

        A page is taken to hold what was given out, however it is encoded. In anything else the
        token is looked for: ``login()`` changes it, and most answers do not show it.
        """
        if not (self._given or GIVEN_OUT in self._request.META):
            return False
        if not isinstance(response, HttpResponse):
            return True  # it is streamed, and not kept anyway
        if response.content and _media_type(response.get("Content-Type", "")) in _PAGES:
            return True
        secret = self._request.META.get("CSRF_COOKIE", "")
        return any(_matches(text, secret) for text in _candidates(response.content))


def nonce_of(request: HttpRequest) -> str:
    """The nonce of this answer's Content-Security-Policy, which lets its scripts run; empty: none.

    Django's middleware and that of django-csp send another one with each answer.
    """
    nonce = getattr(request, "_csp_nonce", None)
    return str(nonce) if nonce else ""  # Django's is false until it is used


def nonce_is_in(response: HttpResponseBase, request: HttpRequest) -> bool:
    """Whether an answer holds that nonce: with another one, its scripts would not run."""
    nonce = nonce_of(request)
    return bool(nonce) and nonce.encode() in getattr(response, "content", b"")


def _candidates(content: bytes) -> Iterator[str]:
    """What may be a token; letters of an escape sequence may stand before it or after it."""
    for match in _LETTERS.finditer(content):
        letters = match[0].decode()
        for length in (csrf.CSRF_TOKEN_LENGTH, csrf.CSRF_SECRET_LENGTH):
            if len(letters) >= length:
                yield letters[:length]
                yield letters[-length:]


def suited_to(request: HttpRequest, payload: Payload, content_type: str) -> Payload:
    """The payload, marked where its request did not choose its form by ``Accept``.

    A view that ignores ``Accept`` gives a retry the same answer as the first request.

    Args:
        request: the one that is answered.
        payload: what is to be stored of the answer.
        content_type: the answer's.
    """
    if _admits(request.META.get("HTTP_ACCEPT", ""), content_type):
        return payload
    return replace(payload, headers=(*payload.headers, _ANY_FORM))


def refuse_unacceptable(request: HttpRequest, payload: Payload) -> None:
    """Refuse a replay in a form that the request does not accept.

    Raises:
        AnswerNotAcceptable: the stored ``Content-Type`` is not among what ``Accept`` admits.
    """
    if not payload.body or _ANY_FORM in payload.headers:
        return
    accept = request.META.get("HTTP_ACCEPT", "")
    for name, value in payload.headers:
        if name.lower() == "content-type" and not _admits(accept, value):
            raise AnswerNotAcceptable


@lru_cache(maxsize=256)  # a client sends the same header with each request
def _admits(accept: str, content_type: str) -> bool:
    if accept in ("", "*/*", content_type) or not content_type:
        return True
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = accept
    # Parameters say how to write a type ("indent=4"), or which version of it, not which it is.
    media_type = _media_type(content_type)
    ranges = (f"{each.main_type}/{each.sub_type}".lower() for each in request.accepted_types)
    return request.accepts(media_type) or media_type in ranges


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
