"""``{% load idempotency %}``: keys for HTML forms."""

from __future__ import annotations

import uuid

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..policy import keys

register = template.Library()


@register.simple_tag
def idempotency_key(name: str = keys.FORM_FIELD) -> SafeString:
    """A hidden field with a new key, for a view whose policy has ``key=keys.form_field()``.

    Args:
        name: of the field, as given to :func:`~idempotency_django.policy.keys.form_field`.
    """
    # Browsers that restore a form's fields after a reload would send the former page's key.
    field = '<input type="hidden" name="{}" value="{}" autocomplete="off">'
    return format_html(field, name, uuid.uuid4())
