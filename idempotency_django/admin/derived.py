"""The page with an operation's derived keys: what somebody else's service knows its part by."""

from __future__ import annotations

from typing import Any, Final

from django.contrib.admin import ModelAdmin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ..engine.steps import LONGEST_NAME
from ..models import IdempotencyStep
from ..policy.seals import derived_keys

TEMPLATE: Final = "admin/idempotency_django/idempotencykey/derived_keys.html"


def show_derived_keys(
    model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any], record: Any
) -> HttpResponse:
    """The derived keys of the record, the one among the rows: of its steps, and of a name typed."""
    steps = IdempotencyStep.objects.using(rows.db).filter(record=record.pk).order_by("position")
    name = request.GET.get("name", "")[:LONGEST_NAME]
    names = dict.fromkeys([*steps.values_list("name", flat=True), *filter(None, [name])])
    refusal, derived = "", {}
    try:
        derived = derived_keys(
            scope=record.scope,
            key=record.key,
            fingerprint=rows.values_list("fingerprint", flat=True).get(),
            names=names,
        )
    except ValueError as error:
        refusal = str(error)
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": _("Derived keys"),
        "original": record,
        "derived": derived,
        "refusal": refusal,
        "name": name,
        "longest": LONGEST_NAME,
    }
    return TemplateResponse(request, TEMPLATE, context)
