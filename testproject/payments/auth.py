"""The API's tokens, for views that DRF does not check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from rest_framework.authentication import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

View = Callable[..., Any]


def token_required(view: View) -> View:
    """Let in those who send ``Authorization: Token …``, as ``request.user``; 401 for others."""

    @functools.wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return _refusal(request) or view(request, *args, **kwargs)

    @functools.wraps(view)
    async def achecked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        refusal = await sync_to_async(_refusal)(request)
        return refusal or await view(request, *args, **kwargs)

    return achecked if iscoroutinefunction(view) else checked


def _refusal(request: HttpRequest) -> HttpResponseBase | None:
    """The response to a caller who is not known; one who is becomes the request's user."""
    try:
        caller = TokenAuthentication().authenticate(Request(request))
    except AuthenticationFailed:
        caller = None
    if caller is None:
        return JsonResponse(
            {"detail": "Send the header 'Authorization: Token …' with a valid token."},
            status=401,
            headers={"WWW-Authenticate": "Token"},
        )
    request.user = caller[0]
    return None
