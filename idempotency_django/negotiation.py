"""The form of an answer: which requests accept it, and what is made for one visitor only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from django.http import HttpRequest

from .errors import AnswerNotAcceptable
from .records import Payload

_ANY_FORM: Final = (":accept", "*/*")
"""A note among the stored headers of an answer whose form did not depend on ``Accept``."""

_GIVEN_OUT: Final = "CSRF_COOKIE_NEEDS_UPDATE"
"""Where Django notes in ``request.META`` that a CSRF token was given out or changed.

It is there from then on: true until the token's cookie is set, then false.
"""


@contextmanager
def noticing_csrf_tokens(request: HttpRequest) -> Iterator[None]:
    """Forget for a while that a token was given out before, as by a decorator around the view."""
    before = request.META.pop(_GIVEN_OUT, False)
    try:
        yield
    finally:
        if before:
            request.META[_GIVEN_OUT] = True


def holds_csrf_token(request: HttpRequest) -> bool:
    """Whether the answer is a page that contains this visitor's token, as far as Django knows."""
    return _GIVEN_OUT in request.META


def suited_to(request: HttpRequest, payload: Payload, content_type: str) -> Payload:
    """The payload, marked where its request did not choose its form by ``Accept``.

    A view that ignores ``Accept`` gives a retry the same answer as the first request.

    Args:
        request: the one that is answered.
        payload: what is to be stored of the answer.
        content_type: the answer's.
    """
    if _admits(request, content_type):
        return payload
    return replace(payload, headers=(*payload.headers, _ANY_FORM))


def refuse_unacceptable(request: HttpRequest, payload: Payload) -> None:
    """Refuse a replay in a form that the request does not accept.

    Raises:
        AnswerNotAcceptable: the stored ``Content-Type`` is not among what ``Accept`` admits.
    """
    if not payload.body or _ANY_FORM in payload.headers:
        return
    for name, value in payload.headers:
        if name.lower() == "content-type" and not _admits(request, value):
            raise AnswerNotAcceptable


def _admits(request: HttpRequest, content_type: str) -> bool:
    header = request.META.get("HTTP_ACCEPT")
    if not header or header == "*/*" or not content_type:
        return True
    # Parameters say how to write a type ("indent=4"), or which version of it, not which it is.
    media_type = content_type.partition(";")[0].strip().lower()
    ranges = (f"{each.main_type}/{each.sub_type}".lower() for each in request.accepted_types)
    return request.accepts(media_type) or media_type in ranges
