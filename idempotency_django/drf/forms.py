"""The forms of REST framework's browsable API send a key."""

from __future__ import annotations

import uuid
from functools import lru_cache
from typing import Any

from django.utils.html import format_html
from rest_framework import renderers
from rest_framework.request import Request, is_form_media_type

from ..conf import conf
from ..http.bodies import body_of
from ..policy.invocation import Form
from ..policy.keys import FORM_FIELD
from .adapter import is_page


class KeysInForms:
    """Makes the forms of a browsable API send a key. Put it before the renderer in the bases.

    Each page has one key, which every form of the page sends. A form that is submitted twice
    therefore has one effect.
    """

    template = "idempotency_django/browsable_api.html"

    def get_context(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        context: dict[str, Any] = super().get_context(*args, **kwargs)  # type: ignore[misc]
        key = str(uuid.uuid4())
        context["idempotency_template"] = super().template  # type: ignore[misc]
        context["idempotency_header"] = conf.header
        context["idempotency_key"] = key
        if context.get("post_form"):  # the browser sends it by itself, without any header of ours
            context["post_form"] = format_html(
                # Browsers that restore a form's fields would send the former page's key.
                '<input type="hidden" name="{}" value="{}" autocomplete="off">{}',
                FORM_FIELD,
                key,
                context["post_form"],
            )
        return context


class BrowsableAPIRenderer(KeysInForms, renderers.BrowsableAPIRenderer):
    """REST framework's renderer, for views that are protected by the middleware or ``@idempotent``.

    Views with ``IdempotentViewMixin`` do not need it: the mixin makes their own renderers send
    keys.
    """


@lru_cache(maxsize=64)
def with_keys(renderer_class: type[Any]) -> type[Any]:
    """A renderer of the browsable API that sends keys, derived from the given one."""
    if issubclass(renderer_class, KeysInForms):
        return renderer_class
    body = {"__module__": renderer_class.__module__, "__doc__": renderer_class.__doc__}
    return type(renderer_class.__name__, (KeysInForms, renderer_class), body)


def key_in_form(request: Request) -> str | None:
    """The key in the hidden field of a form of the browsable API; ``None``: it has none."""
    if not (is_page(request) and is_form_media_type(request.content_type)):
        return None
    http: Any = request._request
    if http._read_started and not hasattr(http, "_body"):  # an authentication has looked into it
        data: Any = request.data
        return data.get(FORM_FIELD) or None
    body = body_of(http)
    values = body.fields.get(FORM_FIELD) if isinstance(body, Form) else None
    return values[-1] or None if values else None
