"""The API's tokens, for views that DRF does not check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from rest_framework.authentication import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

View = Callable[..., HttpResponseBase]


def token_required(view: View) -> View:
    """Let in those who send ``Authorization: Token …``, as ``request.user``; 401 for others."""

    @functools.wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
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
        return view(request, *args, **kwargs)

    return checked
